"""Agents that break a promise each, and one that keeps all without being an ActorCritic."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from dase_grpc.learning.agents.networks import Sizes
from dase_grpc.learning.agents.td3 import TD3
from dase_grpc.learning.envs.noise import Noise


class Plain:
    """TD3, but nothing else of it than the protocol."""

    def __init__(self, config, schema, *, seed, agent_id, device):
        own = TD3(config, schema, seed=seed, agent_id=agent_id, device=device)
        self.policy, self._own = own.policy, own
        for name in ("act", "policy_actions", "update", "take_steps", "state_dict", "load_state_dict"):
            setattr(self, name, getattr(own, name))

    @property
    def updates(self):
        return self._own.updates

    @property
    def uses_actions(self):
        return self._own.uses_actions


class Noisy(TD3):
    def act(self, observation):
        return np.clip(super().act(observation) + np.random.default_rng().normal(), -1, 1).astype(np.float32)


class Global(TD3):
    def _draw(self, noise):
        for place in noise:
            place.copy_(0.2 * torch.randn(place.shape))


class Unseeded(TD3):
    def __init__(self, config, schema, *, seed, **given):
        super().__init__(config, schema, seed=0, **given)


class Floating(TD3):
    def update(self, batch, weight, **given):
        return {name: float(value) for name, value in super().update(batch, weight, **given).items()}


class Frozen(TD3):
    def _moves_actor(self, update):
        return False


class Unweighted(TD3):
    def update(self, batch, weight, **given):
        return super().update(batch, torch.ones_like(weight), **given)


class Summed(TD3):
    """Sums the weighted rows instead of taking their mean."""

    def _learn(self, batch, share, policy, *noise):
        return super()._learn(batch, share * self.total, policy, *noise)

    def update(self, batch, weight, **given):
        self.total = weight.sum()
        return super().update(batch, weight, **given)


class Scribbling(TD3):
    def update(self, batch, weight, **given):
        batch.reward.mul_(2)
        return super().update(batch, weight, **given)


class Endless(TD3):
    def update(self, batch, weight, **given):
        return super().update(replace(batch, bootstrap=torch.ones_like(weight)), weight, **given)


class Misled(TD3):
    """Takes rows whose actions it is given for others than it does without."""

    def update(self, batch, weight, *, actions=None):
        return super().update(batch, weight if actions is None else weight.cumsum(0))


class Forgetful(TD3):
    def state_dict(self):
        return {name: value for name, value in super().state_dict().items() if "generator" not in name}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]):
        super().load_state_dict({**super().state_dict(), **state})


class Lenient(TD3):
    def load_state_dict(self, state):
        own = self.state_dict()
        super().load_state_dict({name: state.get(name, value) for name, value in own.items()})


class Poisoned(TD3):
    def update(self, batch, weight, **given):
        losses = super().update(batch, weight, **given)
        self.policy.flat.values.add_(0 * losses["critic_loss"])
        return losses


class Uncounted(TD3):
    def take_steps(self):
        return {"critic": replace(super().take_steps()["critic"], tried=0)}


class Larger(TD3):
    def _make_networks(self, sizes, start):
        return super()._make_networks(Sizes(sizes.m, sizes.n, [2 * each for each in sizes.hidden]), start)


class Own(Noise):
    def __call__(self, action, *, version, length, rng):
        return action + np.random.default_rng().standard_normal(len(action))


class Blind(TD3):
    exploration = staticmethod(lambda config, schema: Own())


class Gross(Noise):
    def __call__(self, action, *, version, length, rng):
        return np.zeros(7)


class Misshapen(TD3):
    exploration = staticmethod(lambda config, schema: Gross())


class Scaled(TD3):
    """Learns otherwise than TD3, but has its `kind`."""

    def _learn(self, batch, share, policy, *noise):
        return super()._learn(replace(batch, reward=2 * batch.reward), share, policy, *noise)


class Silent(TD3):
    def _errors(self, values, target):
        return {}


class Narrow(TD3):
    """Does not hand on what an ActorCritic is made with."""

    def __init__(self, config, schema, *, seed, agent_id, device):
        super().__init__(config, schema, seed=seed, agent_id=agent_id, device=device)


class Raising(TD3):
    def update(self, batch, weight, **given):
        raise ValueError("no such thing")


BROKEN = {
    Noisy: ("actions", "other actions for the same observations"),
    Global: ("seed", "two agents of one seed differ after the same updates"),
    Unseeded: ("seed", "another seed gives the same policy"),
    Floating: ("update", "gave an object of type float as critic_loss"),
    Frozen: ("update", "did not move the policy"),
    Unweighted: ("weights", "what rows of weight 0 hold changed"),
    Summed: ("weights", "weights four times as large changed"),
    Scribbling: ("batch", "an update changed the batch's reward"),
    Endless: ("bootstrap", "what comes after a termination (bootstrap 0) changed"),
    Misled: ("given", "giving update the actions changed"),
    Forgetful: ("state", "after a load updates differ in"),
    Lenient: ("refusal", "load_state_dict took a state without actor.weight.0"),
    Poisoned: ("finite", "a reward of NaN made actor."),
    Uncounted: ("steps", "count each optimiser's steps"),
    Larger: ("policy", "load_policy refuses its state"),
    Blind: ("exploration", "two noises with the same generator differ"),
    Misshapen: ("exploration", "has to give 2 numbers"),
    Scaled: ("stack", "`kind`, by which it learns there, changes critic_loss"),
    Silent: ("errors", "td_error is nothing"),
}
