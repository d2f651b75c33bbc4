"""PolicyBoard against a model: publishers resend, fall back, break off, overlap and start again."""

from contextlib import ExitStack

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dase_grpc.errors import MalformedError, StalePolicyError
from dase_grpc.replay.buffer.policies import IncomingPolicy, PolicyBoard, PolicyBytes

AGENTS = (0, 1)
PAYLOADS = (b"a", b"bb", b"a longer policy")

agents = st.sampled_from(AGENTS)
policies = st.builds(
    lambda payload, agent_id, epoch, version, step: PolicyBytes.of(
        payload, agent_id=agent_id, epoch=epoch, version=version, step=step
    ),
    st.sampled_from(PAYLOADS),
    agents,
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(0, 2),
)


class Publishers(RuleBasedStateMachine):
    """The model: per agent the latest policy that arrived whole, and the stream that is open."""

    def __init__(self) -> None:
        super().__init__()
        self.board = PolicyBoard()
        self.latest: dict[int, PolicyBytes] = {}
        self.open: dict[int, tuple[ExitStack, IncomingPolicy, PolicyBytes]] = {}
        self.spoilt: dict[int, bool] = {}
        self.superseded: list[tuple[ExitStack, IncomingPolicy]] = []

    def teardown(self) -> None:
        for stack, *_ in (*self.open.values(), *self.superseded):
            stack.close()
        assert self.board.incoming_bytes == 0

    def expected(self, policy: PolicyBytes) -> bool | None:
        """Whether it would change the board; None if it is refused."""
        held = self.latest.get(policy.agent_id)
        if held is None or (policy.epoch, policy.version) > (held.epoch, held.version):
            return True
        if (policy.epoch, policy.version, policy.payload) != (held.epoch, held.version, held.payload):
            return None
        return policy.step > held.step

    @rule(policy=policies)
    def begin(self, policy: PolicyBytes) -> None:
        announced = {
            "agent_id": policy.agent_id,
            "epoch": policy.epoch,
            "version": policy.version,
            "size": len(policy.payload),
            "sha256": policy.sha256,
            "step": policy.step,
        }
        if self.expected(policy) is None:
            with pytest.raises(StalePolicyError), self.board.arriving(IncomingPolicy(**announced)):
                pytest.fail("it was let in")
            return
        stack = ExitStack()
        incoming = stack.enter_context(self.board.arriving(IncomingPolicy(**announced)))
        if policy.agent_id in self.open:
            self.superseded.append(self.open[policy.agent_id][:2])
        self.open[policy.agent_id] = (stack, incoming, policy)
        self.spoilt[policy.agent_id] = False

    @rule(agent=agents, size=st.integers(1, 20), spoil=st.booleans())
    def add(self, agent: int, size: int, spoil: bool) -> None:
        if agent not in self.open:
            return
        _, incoming, policy = self.open[agent]
        held = incoming.held_bytes
        piece = policy.payload[held : held + size] if not spoil else b"!" * size
        if not 0 < len(piece) <= len(policy.payload) - held:
            with pytest.raises(MalformedError):
                incoming.add(piece)
            return
        incoming.add(piece)
        self.spoilt[agent] = self.spoilt.get(agent, False) or spoil

    @rule(agent=agents)
    def finish(self, agent: int) -> None:
        if agent not in self.open:
            return
        stack, incoming, policy = self.open.pop(agent)
        with stack:
            if not incoming.whole or self.spoilt.get(agent):
                with pytest.raises(MalformedError):
                    incoming.finish()
                return
            arrived = incoming.finish()
            assert arrived == policy
            outcome = self.expected(policy)
            if outcome is None:
                with pytest.raises(StalePolicyError):
                    self.board.publish(arrived)
                return
            assert self.board.publish(arrived) is outcome
            if outcome:
                self.latest[agent] = arrived

    @rule(policy=policies)
    def overtake(self, policy: PolicyBytes) -> None:
        """Another policy of the agent becomes the latest while one is arriving."""
        outcome = self.expected(policy)
        if outcome is None:
            with pytest.raises(StalePolicyError):
                self.board.publish(policy)
            return
        assert self.board.publish(policy) is outcome
        if outcome:
            self.latest[policy.agent_id] = policy

    @rule(agent=agents)
    def break_off(self, agent: int) -> None:
        if agent in self.open:
            self.open.pop(agent)[0].close()

    @rule()
    def superseded_streams_get_nowhere(self) -> None:
        for stack, incoming in self.superseded:
            with pytest.raises(StalePolicyError):
                incoming.add(b"late")
            stack.close()
        self.superseded.clear()

    @invariant()
    def the_board_holds_the_greatest_that_arrived_whole(self) -> None:
        assert {agent: self.board.latest(agent) for agent in self.board.agents()} == self.latest
        assert self.board.versions == {agent: policy.version for agent, policy in self.latest.items()}

    @invariant()
    def only_open_streams_hold_bytes(self) -> None:
        held = sum(incoming.held_bytes for _, incoming, _ in self.open.values())
        assert self.board.incoming_bytes == held


TestPublishers = Publishers.TestCase
TestPublishers.settings = settings(max_examples=60, stateful_step_count=30)
