"""ActorCritic: acting, optimisers, target networks and saving, which the algorithms share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.learning.agents.batch import Batch, counted, that_count
from dase_grpc.learning.agents.equations import TD_ERROR, NoiseStream, td_error
from dase_grpc.learning.agents.memory import OWN, Flat, Memory, StackedMemory
from dase_grpc.learning.agents.networks import Actor, LateActionCritic, Sizes, Start, TwinCritic, restore
from dase_grpc.learning.agents.optimiser import GuardedSteps, Steps
from dase_grpc.learning.agents.passes import PRODUCTS, ActorPass, Buffers
from dase_grpc.learning.agents.policy import ActorPolicy, Normaliser
from dase_grpc.learning.agents.stack import Kind, Stack
from dase_grpc.schema import Array, TransitionSchema
from dase_grpc.seeding import Purpose, integer

UPDATES: Final = "updates"
NOISE_STATE: Final = "target_noise.generator"


class ActorCritic(ABC):
    """An `Agent` but for its update, which a subclass brings.

    Owned by one thread. Networks come from the run's seed and the agent's id, the same bits on every device;
    torch's global random state is neither read nor changed. The state's tensors are updated in place.

    On a CPU the passes of an update are written out (`passes`), and rows that cannot count are left out. On
    other devices an update is that of a stack of one (`stack`), by autograd: their reference twin.

    Where the passes multiply in bfloat16, only what moves the networks is rounded: π(s), by which the agent
    acts and is compared, is exact. The reference twin rounds nothing.

    Args:
        memory: what gives out all tensors of the state.
        autograd: whether updates are those of the reference twin; None for wherever it is not a CPU.

    Attributes:
        updates, policy: see Agent.
        tells_errors: whether updates are to give `td_error`.
        td_error: of the last update's rows, |Q − y| of each, (B,), and 0 of those that weighed nothing.
        flats: the flat tensors of its networks, "actor", "critic" and "target_" before either.
    """

    kind: ClassVar[Kind]
    _critic: TwinCritic | LateActionCritic
    _target_critic: TwinCritic | LateActionCritic

    def __init__(
        self,
        config: AgentConfig,
        schema: TransitionSchema,
        *,
        seed: int,
        agent_id: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        memory: Memory = OWN,
        autograd: bool | None = None,
    ) -> None:
        self.config = config
        self._by_autograd = device.type != "cpu" if autograd is None else autograd
        alone = StackedMemory(1) if self._by_autograd and not memory.stacked else None
        if alone is not None:
            memory = alone.of(0)
        generator = torch.Generator().manual_seed(integer(seed, Purpose.NETWORKS, agent_id))
        networks = self._make_networks(
            Sizes.of(config, schema), Start(generator, device, dtype, self.kind.bounds)
        )
        self.flats = {name: _flat(network, name, memory) for name, network in networks.items()}
        targets = (name for name in networks if name.startswith("target_"))
        self._followed = [(self.flats[name], self.flats[name.removeprefix("target_")]) for name in targets]
        self._noise = NoiseStream(seed, agent_id, device) if self._noise_scales else None
        self._normaliser = None
        if config.normalise_observations:
            self._normaliser = Normaliser.new(schema.observation_size, device, memory=memory)
        self.policy = ActorPolicy(self._actor, self.flats["actor"], self._normaliser)
        decay = config.critic_weight_decay
        self._actor_steps = GuardedSteps(self.flats["actor"], lr=config.actor_lr)
        self._critic_steps = GuardedSteps(self.flats["critic"], lr=config.critic_lr, weight_decay=decay)
        self.updates = 0
        self._tensors = self._state_tensors(networks)
        self._products = PRODUCTS[config.products]
        self._room = Buffers.of(self._critic)  # of each pass that is over before the next begins
        # apart, for the one in the actor's loss is kept
        self._actor_pass = ActorPass(self._actor, Buffers.of(self._actor), gradients=self._products)
        self._target_actor_pass = ActorPass(self._target_actor, self._room, values=self._products)
        self._write_out()
        self._alone = None if alone is None else self.stack_of(alone)
        self._turn = torch.ones(1, dtype=torch.bool, device=device)
        self.tells_errors = False
        self.td_error: Tensor | None = None

    def _make_networks(self, sizes: Sizes, start: Start) -> dict[str, nn.Module]:
        self._actor = Actor(sizes, start)
        self._critic = self.kind.network(sizes, start)
        self._target_critic = self._critic.frozen_copy()
        self._target_actor = self._actor.frozen_copy() if self.kind.target_actor else self._actor
        networks: dict[str, nn.Module] = {"actor": self._actor, "critic": self._critic}
        if self.kind.target_actor:
            networks["target_actor"] = self._target_actor
        return {**networks, "target_critic": self._target_critic}

    def _state_tensors(self, networks: Mapping[str, nn.Module]) -> dict[str, Tensor]:
        tensors = dict(self.policy.named_tensors())
        for name, network in networks.items():
            tensors |= network.named_parameters(prefix=name)
        tensors |= self._actor_steps.named_tensors("actor_optimizer")
        tensors |= self._critic_steps.named_tensors("critic_optimizer")
        return tensors

    def act(self, observation: Array) -> Array:
        """See ActorPolicy."""
        return self.policy.act(observation)

    @torch.no_grad()
    def policy_actions(self, observation: Tensor) -> Tensor:
        """See Agent."""
        if self._by_autograd:
            return self.policy.actions(observation)
        if self._normaliser is not None:
            observation = self._normaliser.normalise(observation)
        return self._actor_pass.actions(observation)

    @property
    def uses_actions(self) -> bool:
        """See Agent."""
        return not self._by_autograd and self._normaliser is None and self._moves_actor(self.updates + 1)

    def stack_of(self, memory: StackedMemory) -> Stack:
        """What all agents of this kind learn by at once that were made with `memory`."""
        return Stack(self.kind, self.flats, config=self.config, memory=memory)

    @property
    def judgement(self) -> dict[str, Tensor]:
        """What another needs to act like this agent and to value states like it, the tensors themselves."""
        parts = ("actor", "critic", "normaliser")
        return {name: tensor for name, tensor in self._tensors.items() if name.split(".")[0] in parts}

    def judge_as(self, tensors: Mapping[str, Any]) -> None:
        """Takes over the `judgement` among these tensors, which may be more; raises as `restore`."""
        restore(self.judgement, {name: tensors[name] for name in self.judgement if name in tensors})

    @torch.no_grad()
    def value(self, observation: Tensor, action: Tensor) -> Tensor:
        """Q(s, a) as the actor's loss has it, but in the environment's rewards, without gradient; (B,)."""
        if self._normaliser is not None:
            observation = self._normaliser.normalise(observation)
        return self._q(observation, action) / self.config.reward_scale

    def update(self, batch: Batch, weight: Tensor, *, actions: Tensor | None = None) -> Mapping[str, Tensor]:
        """See Agent; losses are critic_loss, q_mean (of the first critic) and, when it moved, actor_loss."""
        noise = self.room_for_noise(batch)
        self._draw(noise)
        return self.update_with(batch, weight, *noise, actions=actions)

    def update_with(
        self, batch: Batch, weight: Tensor, *noise: Tensor, actions: Tensor | None = None
    ) -> Mapping[str, Tensor]:
        """`update` with the noise it draws given, (B, n) each and not clipped yet."""
        self._count_update()
        if self._by_autograd:
            return self._learn_alone(batch, weight, noise)
        with torch.no_grad():
            rows, whole = that_count(weight), weight
            if rows is not None:
                batch, weight = batch.at(rows), weight.index_select(0, rows)
                noise = tuple(drawn.index_select(0, rows) for drawn in noise)
            if self._normaliser is not None:
                batch = self._normaliser.learned(batch, weight)
                actions = None  # they answer to observations as they were seen before
            policy = partial(self._actor_pass.again, actions, batch.observation, rows)
            losses = dict(self._learn(batch, weight / weight.sum(), policy, *noise))
            errors = losses.pop(TD_ERROR, None)
            if errors is not None and rows is not None:
                errors = torch.zeros_like(whole).index_copy_(0, rows, errors)
            self.td_error = errors
        self._actor_pass.forget()
        return losses

    def _errors(self, values: Tensor, target: Tensor) -> dict[str, Tensor]:
        """What `_learn` gives beside losses where somebody asks for it."""
        return {TD_ERROR: td_error(values, target)} if self.tells_errors else {}

    def begin_update(self, noise: Sequence[Tensor]) -> bool:
        """All of an update but its tensor work, drawing into `noise`; whether that is to move the actor."""
        self._draw(noise)
        self._count_update()
        return self._moves_actor(self.updates)

    def room_for_noise(self, batch: Batch) -> tuple[Tensor, ...]:
        """Tensors for what an update of such batches draws, (B, n) each."""
        shape = torch.contiguous_format
        return tuple(torch.empty_like(batch.action, memory_format=shape) for _ in self._noise_scales)

    def _learn_alone(self, batch: Batch, weight: Tensor, noise: Sequence[Tensor]) -> Mapping[str, Tensor]:
        assert self._alone is not None, "only its stack updates a stacked agent"
        turn = self._turn
        losses = self._alone.learn(
            batch.as_stack(),
            weight[None],
            [drawn[None] for drawn in noise],
            live=turn,
            moves=turn if self._moves_actor(self.updates) else None,
        )
        if self.tells_errors:
            self.td_error = counted(losses[TD_ERROR][0], weight)
        return {name: values[0] for name, values in losses.items() if name != TD_ERROR}

    def _draw(self, noise: Sequence[Tensor]) -> None:
        if self._noise is not None:
            for place, std in zip(noise, self._noise_scales, strict=True):
                self._noise.fill(place, std)

    def _count_update(self) -> None:
        self.updates += 1
        self._critic_steps.count()
        if self._moves_actor(self.updates):
            self._actor_steps.count()

    def _follow(self) -> None:
        """Target networks: θ' ← τ θ + (1 − τ) θ'."""
        for target, online in self._followed:
            target.values.lerp_(online.values, self.config.tau)

    # what an algorithm brings

    @property
    def _noise_scales(self) -> tuple[float, ...]:
        """The standard deviations of what an update draws in the shape of the batch's actions, in order."""
        return ()

    def _moves_actor(self, update: int) -> bool:
        """Whether the update of that number, counted from 1, moves the actor too."""
        return True

    @abstractmethod
    def _write_out(self) -> None:
        """Makes the critics' passes, in `_room`."""

    @abstractmethod
    def _q(self, observation: Tensor, action: Tensor) -> Tensor:
        """Q(s, a) as the actor's loss has it, rounding nothing; (B,)."""

    @abstractmethod
    def _learn(
        self, batch: Batch, share: Tensor, policy: Callable[[], Tensor], *noise: Tensor
    ) -> Mapping[str, Tensor]:
        """The update by passes written out, without autograd.

        batch is as the networks see it, share (B,) is w / Σ w, noise what was drawn; policy gives π(s)
        of the batch, and has `_actor_pass` keep the pass.
        """

    # saving

    def take_steps(self) -> dict[str, Steps]:
        """The optimisers' steps since the last call, by network; waits for the device."""
        return {"critic": self._critic_steps.take(), "actor": self._actor_steps.take()}

    def state_dict(self) -> dict[str, Tensor]:
        """Everything training goes on from, as copies under flat, dotted names."""
        state = {name: tensor.detach().clone() for name, tensor in self._tensors.items()}
        state[UPDATES] = torch.tensor(self.updates)
        if self._noise is not None:
            state[NOISE_STATE] = self._noise.state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave; further updates are bit for bit those of the saved agent.

        Between kinds of device (CPU, CUDA) only the noise cannot go on, for their generators have
        nothing in common: it starts a new stream that the seed and the number of updates decide.

        Raises:
            KeyError: a name is missing.
            ValueError: a name too many, or a value of another shape or dtype; nothing is changed.
        """
        updates = torch.zeros((), dtype=torch.int64)
        places = {**self._tensors, UPDATES: updates}
        if self._noise is not None:
            places[NOISE_STATE] = self._noise.room_for(state.get(NOISE_STATE))
        restore(places, state)
        self.updates = int(updates)
        if self._noise is not None:
            self._noise.resume(places[NOISE_STATE], updates=self.updates)
        self._actor_pass.forget()


def _flat(network: nn.Module, name: str, memory: Memory) -> Flat:
    # twins apart: then those of all agents in a stack are one batch of 2K
    copies = 2 if memory.stacked and isinstance(network, TwinCritic) else 1
    return Flat(network, name=name, copies=copies, memory=memory)
