"""TD3: twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv 1802.09477).

Both losses are means over the batch weighted by w, as DASE has them (Saglam et al. 2022,
arXiv 2207.13453); with w = 1 they are TD3's own.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from dase_grpc.config import AgentConfig
from dase_grpc.learning.batch import Batch
from dase_grpc.learning.networks import Actor, TwinCritic, restore
from dase_grpc.schema import Array, TransitionSchema
from dase_grpc.seeding import Purpose, integer

UPDATES: Final = "updates"
NOISE_STATE: Final = "target_noise.generator"


@torch.no_grad()
def target_value(
    actor: Actor, critic: TwinCritic, batch: Batch, noise: Tensor, *, config: AgentConfig
) -> Tensor:
    """The target y = r + γ · bootstrap · min(Q1', Q2')(s', clip(π'(s') + clip(ε, ±c), ±1)); (B,).

    actor and critic are the target networks; noise ε is (B, n) and not clipped yet.
    """
    limit = config.target_noise_clip
    action = (actor.actions(batch.next_observation) + noise.clamp(-limit, limit)).clamp_(-1, 1)
    both = critic.both(torch.cat((batch.next_observation, action), dim=1))
    return batch.reward + config.gamma * batch.bootstrap * both.amin(dim=0)


def critic_loss(both: Tensor, target: Tensor, share: Tensor) -> Tensor:
    """Σ share · (Q_i − y)², summed over the two critics.

    both is (2, B), target (B,); share (B,) is w / Σ w.
    """
    return ((both - target).square() @ share).sum()


def actor_loss(actor: Actor, critic: TwinCritic, observation: Tensor, share: Tensor) -> Tensor:
    """−Σ share · Q1(s, π(s)); a gradient reaches the actor only."""
    action = actor.actions(observation)
    return -(critic.first(torch.cat((observation, action), dim=1)) @ share)


class TD3:
    """An `Agent` that learns by TD3.

    Owned by one thread. Networks come from the run's seed and the agent's id, the same bits on
    every device; torch's global random state is neither read nor changed. Every tensor of the
    state is updated in place for as long as the agent lives.
    """

    def __init__(
        self,
        config: AgentConfig,
        schema: TransitionSchema,
        *,
        seed: int,
        agent_id: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._config = config
        self._noise_seed = (seed, Purpose.TARGET_NOISE, agent_id)
        self._noise = torch.Generator(device).manual_seed(integer(*self._noise_seed))
        weights = torch.Generator().manual_seed(integer(seed, Purpose.NETWORKS, agent_id))
        m, n = schema.observation_size, schema.action_size
        self._actor = Actor((m, *config.hidden, n), weights, device=device, dtype=dtype)
        self._critic = TwinCritic((m + n, *config.hidden, 1), weights, device=device, dtype=dtype)
        self._target_actor = self._actor.frozen_copy()
        self._target_critic = self._critic.frozen_copy()
        self._online: list[Tensor] = [*self._actor.parameters(), *self._critic.parameters()]
        self._targets: list[Tensor] = [*self._target_actor.parameters(), *self._target_critic.parameters()]
        self._actor_optimizer = _adam(self._actor.parameters(), lr=config.actor_lr)
        self._critic_optimizer = _adam(self._critic.parameters(), lr=config.critic_lr)
        self._updates = 0
        self._tensors = dict(self._named_tensors())

    @property
    def updates(self) -> int:
        """Training iterations done so far; also the version of the current policy."""
        return self._updates

    def act(self, observation: Array) -> Array:
        """Noise-free actions in [-1, 1]; (B, m) float32 -> (B, n) float32, a new array."""
        return self._actor.act(observation)

    @torch.no_grad()
    def policy_actions(self, observation: Tensor) -> Tensor:
        """π(s) for (B, m) observations on the agent's device, (B, n) in [-1, 1], without gradient."""
        return self._actor.actions(observation)

    def update(self, batch: Batch, weight: Tensor) -> Mapping[str, Tensor]:
        """One training iteration; weight is (B,) and does not sum to 0.

        Returns critic_loss, q_mean (the weighted mean of Q1) and, when the actor was updated,
        actor_loss: scalars that stay on the device. Never synchronises with the host.
        """
        noise = torch.empty_like(batch.action, memory_format=torch.contiguous_format)
        noise.normal_(0, self._config.target_noise, generator=self._noise)
        return self.update_with(batch, weight, noise)

    def update_with(self, batch: Batch, weight: Tensor, noise: Tensor) -> Mapping[str, Tensor]:
        """`update` with the target's smoothing noise (B, n) given, not clipped yet."""
        config = self._config
        share = weight / weight.sum()

        target = target_value(self._target_actor, self._target_critic, batch, noise, config=config)
        both = self._critic.both(batch.state_action)
        loss = critic_loss(both, target, share)
        _step(self._critic_optimizer, loss)
        losses = {"critic_loss": loss.detach(), "q_mean": both.detach()[0] @ share}

        self._updates += 1
        if self._updates % config.policy_delay == 0:
            loss = actor_loss(self._actor, self._critic, batch.observation, share)
            _step(self._actor_optimizer, loss)
            losses["actor_loss"] = loss.detach()
            with torch.no_grad():
                torch._foreach_lerp_(self._targets, self._online, config.tau)
        return losses

    def state_dict(self) -> dict[str, Tensor]:
        """Everything training goes on from, as copies under flat, dotted names.

        actor.*, critic.*, target_actor.*, target_critic.*, actor_optimizer.*, critic_optimizer.*,
        the number of updates and the state of the noise generator.
        """
        state = {name: tensor.detach().clone() for name, tensor in self._tensors.items()}
        state[UPDATES] = torch.tensor(self._updates)
        state[NOISE_STATE] = self._noise.get_state()
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
        own, saved = self._noise.get_state(), state.get(NOISE_STATE)
        noise = own
        if isinstance(saved, Tensor) and saved.dtype == own.dtype:
            noise = torch.empty_like(saved, device="cpu")  # another kind of device has another size
        restore({**self._tensors, UPDATES: updates, NOISE_STATE: noise}, state)
        self._updates = int(updates)
        if noise.shape == own.shape:
            self._noise.set_state(noise)
        else:
            self._noise.manual_seed(integer(*self._noise_seed, self._updates))

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, network in (
            ("actor", self._actor),
            ("critic", self._critic),
            ("target_actor", self._target_actor),
            ("target_critic", self._target_critic),
        ):
            yield from network.named_parameters(prefix=name)
        for name, network, optimizer in (
            ("actor_optimizer", self._actor, self._actor_optimizer),
            ("critic_optimizer", self._critic, self._critic_optimizer),
        ):
            for parameter_name, parameter in network.named_parameters(prefix=name):
                for key, value in optimizer.state[parameter].items():
                    yield f"{parameter_name}.{key}", value


def load_policy(
    config: AgentConfig, schema: TransitionSchema, state: Mapping[str, Any], device: torch.device
) -> Actor:
    """The policy alone, from the `actor.*` tensors of a `state_dict`; other names are ignored.

    Raises:
        KeyError: a tensor of the actor is missing.
        ValueError: one too many, or one of another shape or dtype.
    """
    sizes = (schema.observation_size, *config.hidden, schema.action_size)
    actor = Actor(sizes, torch.Generator(), device=device, dtype=torch.float32).requires_grad_(False)
    restore(
        dict(actor.named_parameters(prefix="actor")),
        {name: value for name, value in state.items() if name.startswith("actor.")},
    )
    return actor


def _adam(parameters: Iterable[nn.Parameter], *, lr: float) -> torch.optim.Adam:
    """Adam whose state exists before the first step, so that every state has the same names."""
    optimizer = torch.optim.Adam(parameters, lr=lr, fused=True)
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def _step(optimizer: torch.optim.Adam, loss: Tensor) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()
