"""What docs/protocol.md tells people who write another client: each statement holds."""

import asyncio
import hashlib
import json
import re
import socket
import struct

import grpc
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from learning.agent_cases import CONFIGS, make
from patience import PATIENCE_S
from replay.wire.services import (
    END,
    SCHEMA,
    acknowledged,
    answers,
    chunk,
    insert_header,
    promptly,
    refusal,
    rows_of,
    sample_header,
    sent,
)
from replay.wire.test_protocol_doc import TEXT

from dase_grpc.learning.agents.policy import CLIP, MIN_DEVIATION
from dase_grpc.learning.envs.answers import ActionMap
from dase_grpc.schema import TransitionSchema


# The fingerprint
def test_the_example_of_a_fingerprint_is_right():
    line = re.search(r"```json\n(.+)\n```", TEXT)[1]
    said = json.loads(line)
    sizes = dict(said["columns"])
    schema = TransitionSchema(
        said["environment"],
        sizes["observation"],
        sizes["action"],
        tuple(float.fromhex(bound) for bound in said["action_low"]),
        tuple(float.fromhex(bound) for bound in said["action_high"]),
    )
    assert schema.action_high == (2.0, float(np.float32(0.4)))
    assert schema.environment == "lab:Süd"
    assert schema.fingerprint == hashlib.sha256(line.encode("ascii")).hexdigest()
    assert f"The fingerprint is `{schema.fingerprint}`." in TEXT


@pytest.mark.parametrize("name", ['"\\', "\n\r\t\b\f\0\x1f\x7f", "é\u2028😀", "a/b:~ "])
@pytest.mark.parametrize("bound", [1e-310, 5e-324, 0.1, 1.5, 1e30, 2.0**-1022])
def test_the_rules_for_names_and_bounds_are_those_of_the_code(name, bound):
    low, high = written(-bound), written(bound)
    columns = [(column, part.stop - part.start) for column, part in SCHEMA.columns.items()]
    text = (
        f'{{"action_high": ["{high}"], "action_low": ["{low}"], "columns": {json.dumps(columns)}, "dtypes": '
        f'["<f4", "<f4", "<f4", "<f4", "<f4", "<i4", "<u4"], "environment": "{escaped(name)}", "format": 1}}'
    )
    schema = TransitionSchema(name, SCHEMA.observation_size, 1, (-bound,), (bound,))
    assert schema.fingerprint == hashlib.sha256(text.encode("ascii")).hexdigest()


def written(bound: float) -> str:
    """A bound as the page says."""
    bits = struct.unpack("<Q", struct.pack("<d", bound))[0]
    sign, exponent, fraction = bits >> 63, (bits >> 52) & 0x7FF, bits & (2**52 - 1)
    first, power = ("1", exponent - 1023) if exponent else ("0", -1022)
    return f"{'-' * sign}0x{first}.{fraction:013x}p{'+' if power >= 0 else '-'}{abs(power)}"


def escaped(name: str) -> str:
    """An environment's name as the page says."""
    short = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
    units = name.encode("utf-16-be")
    codes = [int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2)]
    plain = [chr(code) if 0x20 <= code <= 0x7E else f"\\u{code:04x}" for code in codes]
    return "".join(short.get(chr(code), written) for code, written in zip(codes, plain, strict=True))


# How a policy acts
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_policy_acts_as_the_page_says(config):
    rng = np.random.default_rng(0)
    policy = make(config).policy
    held = dict(policy.named_tensors())
    if "normaliser.mean" in held:
        held["normaliser.mean"].copy_(torch.tensor(rng.normal(size=held["normaliser.mean"].shape)))
        held["normaliser.variance"].copy_(
            torch.tensor(rng.uniform(1e-3, 2, size=held["normaliser.mean"].shape))
        )
    tensors = {name: tensor.detach().numpy() for name, tensor in held.items()}
    documented = re.findall(r"^\| `((?:actor|normaliser)\.[a-z.]+)` ", TEXT, re.MULTILINE)
    assert {re.sub(r"\d+", "k", name) for name in tensors} <= set(documented)
    observations = rng.normal(scale=3, size=(50, len(tensors["actor.weight.0"].T))).astype(np.float32)
    ours = np.array([acted(tensors, observation) for observation in observations])
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, policy.act(observations), rtol=1e-5, atol=1e-6)


def acted(tensors, observation):
    """An action as the page says."""
    z = observation
    if "normaliser.mean" in tensors:
        mean, variance = tensors["normaliser.mean"], tensors["normaliser.variance"]
        assert (mean.dtype, mean.shape) == (variance.dtype, variance.shape) == (np.float64, observation.shape)
        assert f"√variance, {MIN_DEVIATION:g}), −{CLIP:g}), {CLIP:g})" in TEXT
        z = np.minimum(np.maximum((z - mean) / np.maximum(np.sqrt(variance), 0.1), -5), 5).astype(np.float32)
    layers = sum(name.startswith("actor.weight.") for name in tensors)
    for k in range(layers):
        weight, bias = tensors[f"actor.weight.{k}"], tensors[f"actor.bias.{k}"]
        assert (weight.dtype, weight.shape) == (np.float32, (len(bias), len(z)))
        z = weight @ z + bias
        z = np.tanh(z) if k == layers - 1 else np.maximum(0, z)
    return z


def test_an_action_is_scaled_as_the_page_says():
    assert "(1 − a) · low / 2 + (1 + a) · high / 2" in TEXT
    low, high = np.array([-2.0, 0.0, 3.0]), np.array([2.0, 0.4, 10.0])
    scale = ActionMap(Box(low, high, dtype=np.float64))
    for action in ([-1.0, -1.0, -1.0], [1.0, 1.0, 1.0], [0.3, -0.7, 1.5]):
        a = np.array(action)
        expected = np.clip((1 - a) * low / 2 + (1 + a) * high / 2, low, high)
        np.testing.assert_allclose(scale(a.astype(np.float32)), expected, rtol=1e-6)


# What is stored
async def test_actions_out_of_range_and_any_finite_bootstrap_are_stored_to_the_bit(service):
    target = await service.target()
    rows = rows_of(1, 5)
    rows[:, SCHEMA.columns["action"]] = np.array([[1.5], [-7.0], [1.0], [-0.0], [3e38]])
    rows[:, SCHEMA.columns["bootstrap"]] = np.array([[0.99**2], [0.0], [1.0], [-1.0], [2.5]])
    call = await sent(service.stub.Insert(), insert_header(target), chunk(1, rows), END)
    assert (await acknowledged(call, 5)).refused_rows == 0
    assert service.run.store.ring.ordered().tobytes() == rows.tobytes()


# A frame with several batches
async def test_a_frame_of_several_batches_is_whole_and_each_is_so_many_rows_of_it(service):
    target = await service.target()
    service.fill(10)
    request = sample_header(target, batch_size=4, credits=5)
    request.header.batches_per_frame = 3
    call = await sent(service.stub.Sample(), request)
    await call.done_writing()
    frames = [answer.frame for answer in await promptly(answers(call))]
    rows = [(len(frame.rows) // SCHEMA.row_bytes, frame.last) for frame in frames]
    assert rows == [(3 * 4, True), (2 * 4, True)]


# A pace
@pytest.mark.parametrize(
    ("pace", "accepted"),
    [
        ({"updates_per_step": 0.4, "step_error_buffer": 4, "first_steps": 1}, True),
        ({"updates_per_step": 0.4, "step_error_buffer": 4}, False),
        ({"updates_per_step": 0.4, "step_error_buffer": 3, "first_steps": 1}, False),
    ],
    ids=["the least of both", "no first step", "too small a buffer"],
)
async def test_a_pace_below_its_least_numbers_is_refused(service, pace, accepted):
    request = sample_header(await service.target())
    for name, value in pace.items():
        setattr(request.header.pace, name, value)
    call = await sent(service.stub.Sample(), request)
    await call.done_writing()
    if accepted:
        assert await promptly(call.read()) is grpc.aio.EOF
    else:
        assert (await promptly(refusal(call)))[0] is grpc.StatusCode.INVALID_ARGUMENT


# Pings
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and empty settings
PING = bytes([0, 0, 8, 6, 0, 0, 0, 0, 0]) + b"quickly!"
GOAWAY, ENHANCE_YOUR_CALM = 7, 11


async def test_pings_that_are_too_fast_are_sent_away_with_enhance_your_calm(service):
    goaway = await promptly(asyncio.to_thread(sent_away, str(service.address), pings=10))
    _, code = struct.unpack(">II", goaway[:8])
    assert (code, goaway[8:]) == (ENHANCE_YOUR_CALM, b"too_many_pings")


def sent_away(address: str, *, pings: int) -> bytes:
    """What the GOAWAY says that a connection ends with that sends pings and nothing else."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall(PREFACE + PING * pings)
        frames = connection.makefile("rb")
        while len(head := frames.read(9)) == 9:
            body = frames.read(int.from_bytes(head[:3], "big"))
            if head[3] == GOAWAY:
                return body
    raise AssertionError("the connection ended without a GOAWAY")
