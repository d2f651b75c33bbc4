"""How the code is cut: short functions, short modules, names that say what is inside."""

import ast

from contracts.source import ROOT, modules, sources

FUNCTION_LINES = 50
LINES_OF_NINE_IN_TEN = 20
MODULE_LINES = 400
DRAWERS = {"util", "utils", "common", "helper", "helpers", "manager", "managers", "misc"}
QUESTIONS = {"How", "What", "When", "Where", "Whether", "Which", "Who", "Whose", "Why"}
BROAD = {"Exception", "BaseException", "CancelledError"}


def test_every_module_says_its_subject():
    assert [name for name, tree in modules().items() if not ast.get_docstring(tree)] == []


def test_a_modules_first_line_names_what_is_in_it():
    first_words = {name: (ast.get_docstring(tree) or " ").split()[0] for name, tree in modules().items()}
    assert {name: word for name, word in first_words.items() if word in QUESTIONS} == {}


def test_every_module_stays_short():
    lengths = {name: len(text.splitlines()) for name, text in sources().items()}
    assert {name: lines for name, lines in lengths.items() if lines >= MODULE_LINES} == {}


def function_lengths() -> list[tuple[str, int]]:
    return [
        (f"{name.removeprefix('dase_grpc.')}:{node.name}", (node.end_lineno or 0) - node.lineno + 1)
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def test_every_function_stays_short():
    assert {name for name, lines in function_lengths() if lines > FUNCTION_LINES} == set()


def test_nine_of_ten_functions_are_seen_at_a_glance():
    lengths = [lines for _, lines in function_lengths()]
    assert sum(lines > LINES_OF_NINE_IN_TEN for lines in lengths) <= len(lengths) / 10


def test_no_room_and_no_module_is_a_drawer():
    assert [name for name in modules() if set(name.split(".")) & DRAWERS] == []


def swallows(handler: ast.ExceptHandler) -> bool:
    """Whether it catches everything, or a cancellation, and does nothing about it."""
    types = list(ast.walk(handler.type)) if handler.type else []
    caught = {node.id for node in types if isinstance(node, ast.Name)}
    caught |= {node.attr for node in types if isinstance(node, ast.Attribute)}
    idle = all(isinstance(step, (ast.Pass, ast.Continue)) for step in handler.body)
    return idle and (handler.type is None or bool(caught & BROAD))


def test_no_error_is_swallowed_unseen():
    handlers = [
        (f"{name}:{node.lineno}", swallows(node))
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
    ]
    assert handlers
    assert [place for place, swallowed in handlers if swallowed] == []


def test_the_search_for_swallowed_errors_finds_every_spelling():
    everything = ("", " Exception", " (OSError, BaseException)", " Exception as error")
    for caught in (*everything, " asyncio.CancelledError"):
        handler = ast.parse(f"try: f()\nexcept{caught}: pass").body[0].handlers[0]
        assert swallows(handler), caught
    for harmless in (" OSError: pass", " Exception: raise"):
        assert not swallows(ast.parse(f"try: f()\nexcept{harmless}").body[0].handlers[0]), harmless


def test_a_package_file_is_empty_but_for_its_sentence_or_the_names_it_exports():
    for path in ROOT.rglob("__init__.py"):
        if path.parent == ROOT:  # sets what gRPC reads when it is imported
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        statements = tree.body[1:] if ast.get_docstring(tree) else tree.body
        if statements:
            assert isinstance(statements[-1], ast.Assign), path
            assert ast.unparse(statements[-1].targets[0]) == "__all__"
            assert all(isinstance(statement, ast.ImportFrom) for statement in statements[:-1])
