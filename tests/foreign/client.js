// A client of the wire in another language: from docs/protocol.md and the .proto files alone.
//
// It joins, inserts across a stream that breaks, samples, publishes, subscribes and leaves, checks what it
// gets, and prints what it saw as JSON. Its row number k holds k in each column.
//
//   node client.js HOST:PORT PROTO_FOLDER '{"environment": ..., "action_high": [...]}' '[observation]'
"use strict";
const assert = require("node:assert/strict");
const crypto = require("node:crypto");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, protos, schemaText, observationText] = process.argv.slice(2);
const schema = JSON.parse(schemaText);
const files = ["cluster", "policy", "replay"].map((name) => `dase_grpc/replay/wire/v1/${name}.proto`);
const options = { includeDirs: [protos], keepCase: true, longs: Number, defaults: true, oneofs: true };
const api = grpc.loadPackageDefinition(loader.loadSync(files, options)).dase.v1;
const [cluster, policies, replay] = ["ClusterService", "PolicyService", "ReplayService"].map(
  (name) => new api[name](address, grpc.credentials.createInsecure()));
const sizes = [["observation", schema.observation_size], ["action", schema.action_size],
  ["next_observation", schema.observation_size], ["reward", 1], ["bootstrap", 1], ["agent_id", 1],
  ["policy_version", 1]];
const width = sizes.reduce((sum, [, size]) => sum + size, 0);

// Calls
const ask = (client, method, request) => new Promise((resolve, reject) =>
  client[method](request, { deadline: Date.now() + 10000 }, (error, answer) => error ? reject(error) : resolve(answer)));
const reader = (call) => {
  const answers = call[Symbol.asyncIterator]();
  return async () => (await answers.next()).value; // undefined at the end of the stream
};
const refused = async (promise, code, name) => {
  const error = await promise.then(() => assert.fail(`expected ${name}`), (reason) => reason);
  assert.deepEqual([error.code, error.metadata?.get("dase-refusal")], [code, [name]], String(error));
};

// The fingerprint
function hexadecimal(bound) {
  if (bound === 0) return "0x0.0p+0";
  const bits = Buffer.alloc(8);
  bits.writeDoubleBE(Math.abs(bound));
  const digits = bits.toString("hex"), exponent = parseInt(digits.slice(0, 3), 16);
  const power = exponent ? exponent - 1023 : -1022;
  return `${bound < 0 ? "-" : ""}0x${exponent ? 1 : 0}.${digits.slice(3)}p${power < 0 ? "-" : "+"}${Math.abs(power)}`;
}
function fingerprint() {
  const text = (value) => Array.isArray(value) ? `[${value.map(text).join(", ")}]` : JSON.stringify(value).replace(
    /[^\x20-\x7e]/g, (unit) => "\\u" + unit.charCodeAt(0).toString(16).padStart(4, "0"));
  const said = { action_high: schema.action_high.map(hexadecimal), action_low: schema.action_low.map(hexadecimal),
    columns: sizes, dtypes: ["<f4", "<f4", "<f4", "<f4", "<f4", "<i4", "<u4"],
    environment: schema.environment, format: 1 };
  const line = `{${Object.entries(said).map(([key, value]) => `"${key}": ${text(value)}`).join(", ")}}`;
  return crypto.createHash("sha256").update(line).digest("hex");
}

// Rows
function packed(first, last, agentId) {
  const rows = Buffer.alloc(4 * width * (last - first + 1));
  for (let serial = first, at = 0; serial <= last; serial++) {
    for (let column = 0; column < width - 2; column++, at += 4) rows.writeFloatLE(serial, at);
    at = rows.writeInt32LE(agentId, at);
    at = rows.writeUInt32LE(serial, at);
  }
  return rows;
}
function serials(rows) {
  assert.equal(rows.length % (4 * width), 0);
  return Array.from({ length: rows.length / (4 * width) }, (_, row) => {
    const serial = rows.readUInt32LE(4 * (width * (row + 1) - 1));
    for (let column = 0; column < width - 2; column++)
      assert.equal(rows.readFloatLE(4 * (width * row + column)), serial);
    return serial;
  });
}

// Policies
function tensors(bytes) { // safetensors
  const length = Number(bytes.readBigUInt64LE()), head = JSON.parse(bytes.subarray(8, 8 + length));
  const read = { F32: [4, "readFloatLE"], F64: [8, "readDoubleLE"] };
  return Object.fromEntries(Object.entries(head).filter(([name]) => name !== "__metadata__").map(
    ([name, { dtype, shape, data_offsets: [start, end] }]) => {
      const [size, method] = read[dtype], data = bytes.subarray(8 + length + start, 8 + length + end);
      return [name, { shape, values: Array.from({ length: data.length / size }, (_, i) => data[method](size * i)) }];
    }));
}
function action(policy, observation) {
  let z = observation;
  const mean = policy["normaliser.mean"]?.values, variance = policy["normaliser.variance"]?.values;
  if (mean) z = z.map((s, i) => Math.fround(
    Math.min(Math.max((s - mean[i]) / Math.max(Math.sqrt(variance[i]), 0.1), -5), 5)));
  const layers = Object.keys(policy).filter((name) => name.startsWith("actor.weight.")).length;
  for (let k = 0; k < layers; k++) {
    const { shape: [outputs, inputs], values } = policy[`actor.weight.${k}`], bias = policy[`actor.bias.${k}`].values;
    assert.equal(inputs, z.length);
    const sums = Array.from({ length: outputs }, (_, o) =>
      Math.fround(z.reduce((sum, x, i) => Math.fround(sum + Math.fround(values[o * inputs + i] * x)), 0) + bias[o]));
    z = sums.map((x) => k === layers - 1 ? Math.fround(Math.tanh(x)) : Math.max(0, x));
  }
  return z;
}

async function insert(stream, agentId) {
  const open = async () => {
    const call = replay.Insert(), next = reader(call);
    call.write({ header: { stream, writer_id: "foreign" } });
    return { call, next, committed: (await next()).committed_seq };
  };
  const chunk = (first, last) => ({ chunk: { first_seq: first, rows: packed(first, last, agentId) } });
  const broken = await open();
  assert.equal(broken.committed, 0);
  broken.call.write(chunk(1, 10));
  while (broken.committed < 10) broken.committed = (await broken.next()).committed_seq;
  broken.call.write(chunk(11, 20)); // whether this arrives, nobody knows
  broken.call.cancel();
  await assert.rejects(async () => { while (await broken.next()); }, { code: grpc.status.CANCELLED });
  const { call, next, committed } = await open();
  assert.ok(committed === 10 || committed === 20, `${committed} rows are committed`);
  call.write(chunk(6, 25)); // from before what is committed: those rows are dropped
  call.write(chunk(26, 30));
  call.write({ end: {} });
  let last;
  for (let answer; (answer = await next());) last = answer;
  assert.deepEqual([last.committed_seq, last.finished, last.refused_rows], [30, true, 0]);
}

async function sample(stream) {
  const call = replay.Sample(), next = reader(call), batches = [], bytes = 4 * 4 * width;
  call.write({ header: { stream, batch_size: 4, batches_per_frame: 3 }, credits: 5 });
  call.end();
  for (let answer; (answer = await next());) {
    if (answer.kind === "waiting") continue;
    assert.ok(answer.frame.last);
    for (let at = 0; at < answer.frame.rows.length; at += bytes)
      batches.push(serials(answer.frame.rows.subarray(at, at + bytes)));
  }
  assert.equal(batches.length, 5);
  return batches;
}

function publish(stream, version, payload, { whole = true } = {}) {
  return new Promise((resolve, reject) => {
    const call = policies.Publish({ deadline: Date.now() + 10000 }, (error, answer) => error ? reject(error) : resolve(answer));
    const sha256 = crypto.createHash("sha256").update(payload).digest();
    call.write({ header: { stream, version, size: payload.length, sha256, step: 30 } });
    call.write({ chunk: payload.subarray(0, whole ? payload.length : 8) });
    if (whole) call.end();
  });
}

async function subscribe(run_id, count) {
  const call = policies.Subscribe({ run_id, schema_fingerprint: fingerprint(), agent_ids: [] });
  const next = reader(call), got = {};
  for (let i = 0; i < count; i++) {
    const { header } = await next(), pieces = [];
    for (let size = 0; size < header.size; size += pieces.at(-1).length) pieces.push((await next()).chunk);
    const payload = Buffer.concat(pieces);
    assert.equal(payload.length, header.size);
    assert.deepEqual(crypto.createHash("sha256").update(payload).digest(), header.sha256);
    got[header.agent_id] = { version: header.version, payload };
  }
  call.cancel();
  return got;
}

async function main() {
  const join = { node_name: "foreign", node_id: crypto.randomUUID(), schema };
  const { run_id, lease, buffer } = await ask(cluster, "Join", join);
  assert.deepEqual((await ask(cluster, "Join", join)).lease, lease); // as if the answer had been lost
  const member = { run_id, agent_id: lease.agent_id, epoch: lease.epoch, buffer_id: buffer.buffer_id };
  const beat = () => ask(cluster, "Heartbeat", { ...member, progress: { state: "exploring" } });
  const beating = setInterval(() => beat().catch(() => {}), (1000 * lease.ttl_seconds) / 3);
  assert.equal((await ask(replay, "Describe", {})).schema_fingerprint, fingerprint());
  const stream = { run_id, agent_id: lease.agent_id, lease_epoch: lease.epoch, schema_fingerprint: fingerprint(),
    buffer_id: buffer.buffer_id };
  await insert(stream, lease.agent_id);
  const batches = await sample(stream);
  const others = await subscribe(run_id, 1), [other] = Object.values(others);
  const unfinished = refused(publish(stream, 1, other.payload, { whole: false }), grpc.status.FAILED_PRECONDITION, "StalePolicyError");
  await beat(); // so that the header has arrived
  assert.equal((await publish(stream, 2, other.payload)).latest_version, 2);
  await unfinished;
  const all = await subscribe(run_id, 2);
  assert.deepEqual(all[lease.agent_id], { version: 2, payload: other.payload });
  clearInterval(beating);
  await ask(cluster, "Leave", { ...member, reason: "has seen all" });
  await refused(beat(), grpc.status.ABORTED, "StaleLeaseError");
  const actions = action(tensors(other.payload), JSON.parse(observationText));
  console.log(JSON.stringify({ agent_id: lease.agent_id, fingerprint: fingerprint(), batches, actions }));
}

main().catch((error) => {
  console.error(error);
  process.exitCode = 1;
}).finally(() => [cluster, policies, replay].forEach((client) => client.close()));
