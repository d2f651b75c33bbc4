"""DPD: dual policy distillation (Lai et al. 2020, arXiv 2006.04061) of deterministic actor-critics.

Two agents of a pair learn from their own transitions, each by its own algorithm. After its update an
agent moves its policy towards the peer's in those states of the batch where the peer's value is higher,
the more so the higher it is. Equations, and where paper and released code differ: docs/algorithms.md.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from dase_grpc.config.algorithms import ALGORITHMS, AgentConfig, DpdConfig, is_own
from dase_grpc.errors import ConfigError
from dase_grpc.learning.agents.actor_critic import ActorCritic
from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.agents.networks import require_fit, restore
from dase_grpc.learning.agents.optimiser import GuardedSteps, Steps
from dase_grpc.learning.agents.policy import ActorPolicy, PeerPolicies, Published
from dase_grpc.schema import Array

PEER_VERSION: Final = "peer_version"
SHOWN_VERSION: Final = "published_version"
NO_VERSION: Final = -1

_log = logging.getLogger("dase")


def confidence(advantage: Tensor, config: DpdConfig) -> Tensor:
    """How much each state weighs: clip(exp(α ξ), 1/c, c) where it is distilled on, else 0; (B,).

    advantage is ξ = V_peer − V_own, (B,). A ξ that is NaN is distilled on nowhere.
    """
    limit = config.max_confidence
    weight = (config.alpha * advantage).exp().clamp(1 / limit, limit)
    chosen = advantage > 0 if config.states == "disadvantageous" else ~advantage.isnan()
    return torch.where(chosen, weight, 0.0)


def distillation_loss(actions: Tensor, peer_actions: Tensor, share: Tensor) -> Tensor:
    """Σ share · mean over the dimensions of (π(s) − π_peer(s))²; actions are (B, n), share (B,)."""
    return (actions - peer_actions).square().mean(dim=1) @ share


@dataclass(frozen=True)
class Pairing:
    """Whom an agent of a pair learns from: the peer's id and how it learns, and where both show policies."""

    agent_id: int
    config: AgentConfig
    policies: PeerPolicies


class DPD:
    """An `Agent` that learns by its own algorithm and by distilling its peer's policy.

    It shows its actor and critic every `publish_every` updates, and takes the peer's latest as soon as
    they are there; both copy between the host and the device, all else never waits for the device. Until
    the peer has shown any, it learns alone. Owned by one thread, as `ActorCritic` is.

    Args:
        own: the agent that learns.
        peer: an agent made as the peer is, which never learns here: a place for its networks.
    """

    def __init__(self, own: ActorCritic, peer: ActorCritic, *, pairing: Pairing, config: DpdConfig) -> None:
        self._own = own
        self._peer = peer
        self._pairing = pairing
        self._config = config
        flat = own.policy.flat
        self._steps = GuardedSteps(flat, lr=config.lr_factor * own.config.actor_lr, name="distillation")
        self._terms = terms(own.config)
        self._peer_terms = terms(peer.config)
        self._seen: Published | None = None
        # NumPy's, which nobody waits for; the state's tensors share their memory
        self._peer_version, self._shown_version = np.array(NO_VERSION), np.array(NO_VERSION)
        self._shown = {name: torch.zeros_like(tensor) for name, tensor in own.judgement.items()}
        self._totals = _Totals(flat.values.device)
        self._tensors = dict(self._steps.named_tensors("distillation_optimizer"))
        self._tensors |= {f"peer.{name}": tensor for name, tensor in peer.judgement.items()}
        self._tensors |= {f"published.{name}": tensor for name, tensor in self._shown.items()}
        self._tensors |= {f"distillation_totals.{name}": each for name, each in self._totals.tensors.items()}
        self._tensors[PEER_VERSION] = torch.from_numpy(self._peer_version)
        self._tensors[SHOWN_VERSION] = torch.from_numpy(self._shown_version)
        self._names = {name.split(".")[0] for name in self._tensors}

    @property
    def updates(self) -> int:
        """See Agent."""
        return self._own.updates

    @property
    def policy(self) -> ActorPolicy:
        """See Agent."""
        return self._own.policy

    def act(self, observation: Array) -> Array:
        """See Agent."""
        return self._own.act(observation)

    def policy_actions(self, observation: Tensor) -> Tensor:
        """See Agent."""
        return self._own.policy_actions(observation)

    @property
    def uses_actions(self) -> bool:
        """See Agent."""
        return self._own.uses_actions

    def update(self, batch: Batch, weight: Tensor, *, actions: Tensor | None = None) -> Mapping[str, Tensor]:
        """See Agent: the algorithm's own update, then the distillation, which adds distillation_loss.

        Raises:
            ConfigError: the peer's networks, or what its values mean, are not as they were said to be.
            DaseError: what the peer shows is not a policy.
        """
        self._look_at_peer()
        losses = dict(self._own.update(batch, weight, actions=actions))
        if self._peer_version == NO_VERSION:
            self._totals.counts[ALONE] += 1
        elif self.updates % self._config.distil_every == 0:
            losses["distillation_loss"] = self._distil(batch.observation, weight)
        if self.updates % self._config.publish_every == 0:
            for name, tensor in self._own.judgement.items():
                self._shown[name].copy_(tensor.detach())
            self._shown_version[...] = self.updates
            self._show()
        return losses

    def take_steps(self) -> dict[str, Steps]:
        """See Agent."""
        return {**self._own.take_steps(), "distillation": self._steps.take()}

    def take_statistics(self) -> dict[str, float | int | None]:
        """What the distillations since the last call were like; waits for the device.

        Means over them of their loss, of the share of states distilled on, of the weight of those
        states, and of the updates that the agent is ahead of its peer's policy, None without any; and
        how many updates knew no peer, and how many of its policies were refused.
        """
        return self._totals.take()

    def state_dict(self) -> dict[str, Tensor]:
        """The algorithm's own state and what distilling goes on from, both policies among it."""
        ours = {name: tensor.detach().clone() for name, tensor in self._tensors.items()}
        return {**self._own.state_dict(), **ours}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ActorCritic; shows again what was shown last, so that updates of the pair go on bit for bit."""
        added = {name: value for name, value in state.items() if name.split(".")[0] in self._names}
        require_fit(self._tensors, added)
        self._own.load_state_dict({name: value for name, value in state.items() if name not in added})
        restore(self._tensors, added)
        if self._shown_version != NO_VERSION:
            self._show()

    def _show(self) -> None:
        self._pairing.policies.publish(int(self._shown_version), {**self._shown, **self._terms})

    def _look_at_peer(self) -> None:
        """Takes the peer's latest policy, unless it is the one looked at last or not finite."""
        published = self._pairing.policies.latest(self._pairing.agent_id)
        if published is None or published is self._seen:
            return
        self._seen = published
        who = f"policy {published.version} of agent {self._pairing.agent_id}"
        try:
            require_fit({**self._peer.judgement, **self._peer_terms}, published.tensors)
            for name, value in self._peer_terms.items():
                key = name.partition(".")[2]
                if not torch.equal(published.tensors[name], value):
                    raise ValueError(f"its agent.{key} is another one than agent.{key} here")
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"{who} is not what this learner's settings say ({error.args[0]}); start both learners of "
                f"the pair with the same settings"
            ) from None
        if not all(bool(tensor.isfinite().all()) for tensor in published.tensors.values()):
            self._totals.counts[REFUSED] += 1
            _log.warning("%s holds numbers that are not finite; the one before stays", who)
            return
        self._peer.judge_as(published.tensors)
        self._peer_version[...] = published.version

    def _distil(self, observation: Tensor, weight: Tensor) -> Tensor:
        """Moves the policy towards the peer's where that is better; returns the loss before the step."""
        actions = self._own.policy.actions(observation)
        peer_actions = self._peer.policy_actions(observation)
        peer_value = self._peer.value(observation, peer_actions)
        advantage = peer_value - self._own.value(observation, actions.detach())
        trust = confidence(advantage, self._config)
        weight = weight * trust
        total = weight.sum()
        nothing = total == 0
        loss = distillation_loss(actions, peer_actions, weight / torch.where(nothing, 1.0, total))
        # Adam would go on by its momentum although there is no gradient
        self._steps.count()
        loss = self._steps.minimise(loss, skip=nothing.float())
        self._totals.add(loss, trust, lag=self.updates - int(self._peer_version))
        return loss


def terms(config: AgentConfig) -> dict[str, Tensor]:
    """What two agents have to agree on to compare values; travels with the networks, as terms.*."""
    name = config.algorithm
    return {
        "terms.algorithm": torch.tensor(crc32(name.encode()) if is_own(name) else ALGORITHMS.index(name)),
        "terms.gamma": torch.tensor(config.gamma, dtype=torch.float64),
        "terms.reward_scale": torch.tensor(config.reward_scale, dtype=torch.float64),
    }


DONE, LAG, ALONE, REFUSED = range(4)


class _Totals:
    """Sums over the distillations, on the device where they are numbers of the device.

    `counts` are the distillations and their lags, updates without a peer, policies refused; `tensors` what a
    checkpoint keeps, and whoever writes into them sets the totals.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)
        self.counts = np.zeros(4, np.int64)
        self.tensors = {"sums": self._sums, "counts": torch.from_numpy(self.counts)}

    def add(self, loss: Tensor, trust: Tensor, *, lag: int) -> None:
        """Counts one distillation with each state's confidence; never synchronises with the host."""
        chosen = trust > 0
        mean = trust.sum() / chosen.sum().clamp(min=1)
        counted = torch.where(loss.isfinite(), loss, 0.0)  # the sums are saved
        parts = counted, chosen.double().mean(), mean, chosen.any()
        self._sums += torch.stack([part.double() for part in parts])
        self.counts[DONE] += 1
        self.counts[LAG] += lag

    def take(self) -> dict[str, float | int | None]:
        """The means and counts so far; starts afresh."""
        loss, share, trust, chosen = self._sums.tolist()
        count, lag, alone, refused = self.counts.tolist()
        self._sums.zero_()
        self.counts[:] = 0
        return {
            "distillation_loss": loss / count if count else None,
            "distilled_share": share / count if count else None,
            "confidence": trust / chosen if chosen else None,
            "peer_lag": lag / count if count else None,
            "undistilled_updates": alone,
            "refused_policies": refused,
        }
