"""`dase verify`: shows what of a run is sound, what is damaged and from where it can be resumed."""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dase_grpc.nodes.replay import boot_id
from dase_grpc.progress import several
from dase_grpc.replay.buffer.durable import inspect
from dase_grpc.runs.verify import verify


def verify_here(path: Path, console: Console) -> int:
    """Prints a table of the files and what can be resumed.

    Returns 0 if all is sound, 1 if something is damaged, 2 if nothing can be resumed.

    Raises:
        RunDirectoryError: there is no run.
    """
    found = verify(path, kept_buffer=_kept_buffer)
    table = Table("file", "holds", "is")
    for each in found.findings:
        state = Text("sound") if each.problem is None else Text("damaged", style="bold red")
        table.add_row(Text(str(each.path.relative_to(path))), Text(each.content), state)
    console.print(table)
    for each in found.damaged:
        console.print(f"damaged: {each.problem}", soft_wrap=True, markup=False, highlight=False)
    told = f"can be resumed: {found.resumable}" if found.resumable else f"cannot be resumed: {found.reason}"
    console.print(told, soft_wrap=True, markup=False, highlight=False)
    if found.resumable is None:
        return 2
    return 1 if found.damaged else 0


def _kept_buffer(folder: Path) -> str | None:
    """What a replay's data directory holds; None where there is none.

    Raises:
        DataDirectoryError: it is damaged.
    """
    state = inspect(folder, boot_id=boot_id())
    if state is None:
        return None
    told = f"buffer, {several(state.transitions, 'transition')} of {several(state.writers, 'writer')}"
    return f"{told} as of the last sync, since the machine has stopped" if state.machine_stopped else told
