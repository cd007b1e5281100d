// Runs the test vectors against the built browser device: node browser_vectors.mjs BUILT FOLDER; prints what differs.
import { big, device, drawAs, giveFile, Memory, objectsOf, ownerOf, read } from "./browser_device.mjs";

const { hex, unhex, unbase64, base64, Double } = device;
const found = {};
let group = "";

function check(what, given, expected, close = 0) {
  found[group] ??= { checked: 0, wrong: [] };
  found[group].checked++;
  const same = close
    ? given.length === expected.length && given.every((number, place) => Math.abs(number - expected[place]) <= close)
    : JSON.stringify(given) === JSON.stringify(expected);
  if (!same) found[group].wrong.push(`${what}: ${JSON.stringify(given)?.slice(0, 300)}, not ${JSON.stringify(expected)?.slice(0, 300)}`);
}

async function during(name, body) {
  group = name;
  found[group] ??= { checked: 0, wrong: [] };
  try {
    await body();
  } catch (error) {
    found[group].wrong.push(error.stack);
  }
}

// -- parts -----------------------------------------------------------------------------------------------------------

const facts = ([key, kind, value]) => [key, kind === "double" ? new Double(value) : kind === "bytes" ? unbase64(value) : value];
const TYPES = { float32: Float32Array, float64: Float64Array, int32: Int32Array, int64: BigInt64Array, uint8: Uint8Array };
const vector = ([dtype, numbers]) => (dtype === "int64" ? BigInt64Array.from(numbers, BigInt) : TYPES[dtype].from(numbers));
const recordsOf = (described) => Object.entries(described).map(([name, record]) => [
  name, Object.fromEntries(record.config ? record.config.map(facts) : Object.entries(record.arrays).map(([key, one]) => [key, vector(one)])),
]);
const packs = (described) => !JSON.stringify(described).includes('"float16"'); // a device sends none

await during("objects", async () => {
  for (const { name, records, id, objects } of read("objects").cases) {
    const parsed = device.parseRecords(id, objectsOf(objects));
    for (const [key, record] of Object.entries(records))
      for (const [one, [, numbers]] of Object.entries(record.arrays ?? {})) check(`${name} ${one}`, Array.from(parsed[key][one], Number), numbers);
    for (const [key, kind, value] of records.fairfold?.config ?? []) {
      const got = parsed.facts[key];
      check(`${name} ${key}`, got instanceof Double ? got.value : got instanceof Uint8Array ? base64(got) : Number.isNaN(Number(got)) || typeof value !== "number" ? got : Number(got), value);
    }
    if (!packs(records)) continue;
    const made = new Map(), tree = await device.packRecords(recordsOf(records), made);
    check(`${name}: id`, tree.id, id);
    check(`${name}: objects`, Object.fromEntries([...made].map(([key, one]) => [key, base64(one)]).sort()), Object.fromEntries(Object.entries(objects).sort()));
  }
  const { chunks } = read("objects"), large = new Float32Array(chunks.float32.zeros + chunks.float32.then.length), made = new Map();
  large.set(chunks.float32.then, chunks.float32.zeros);
  const tree = await device.packRecords([["arrays", { sum: large }]], made);
  check("chunks", tree.id, chunks.id);
  check("lengths of chunks", Object.fromEntries([...made].map(([key, one]) => [key, one.length]).sort()), Object.fromEntries(Object.entries(chunks.lengths).sort()));
});

await during("transport", async () => {
  const { signing, requests, exchange } = read("transport"), { subtle } = crypto, algorithm = { name: "ECDSA", namedCurve: "P-384" };
  const key = await subtle.importKey("pkcs8", unbase64(signing.private_key_pkcs8), algorithm, false, ["sign"]);
  const headers = await device.signedHeaders(key, signing.public_key_pem, signing.timestamp);
  check("public key", headers["flwr-public-key"], btoa(signing.public_key_pem));
  // The vector's own signature, and ours, as WebCrypto verifies them.
  const spki = unbase64(signing.public_key_pem.replace(/-----[^-]+-----|\s/g, ""));
  const publicKey = await subtle.importKey("spki", spki, algorithm, false, ["verify"]);
  const raw = (der) => {
    const parts = [], bytes = unbase64(der);
    for (let at = 2; at < bytes.length; at += 2 + bytes[at + 1]) {
      const number = bytes.slice(at + 2, at + 2 + bytes[at + 1]);
      parts.push(device.join(new Uint8Array(Math.max(0, 48 - number.length)), number.slice(-48)));
    }
    return device.join(...parts);
  };
  const hash = { name: "ECDSA", hash: "SHA-256" };
  for (const signature of [signing.signature, headers["flwr-signature"]]) {
    check("signature", await subtle.verify(hash, publicKey, raw(signature), device.utf8(signing.timestamp)), true);
    check("signature's form", base64(device.derSignature(raw(signature))), signature);
  }
  const { joining } = read("transport"), { secret, authority } = await device.parseToken(joining.token);
  check("token", [hex(secret), hex(authority)], [joining.secret, joining.authority]);
  for (const text of joining.refused) check(`token ${text}`, await device.parseToken(text).then(() => "taken", () => "refused"), "refused");
  check("name", await device.deviceName(unhex(joining.point)), joining.name);
  const identity = { pem: "", key: { privateKey: key } }, sent = [], body = (name) => requests.find((one) => one.name === name);
  const connection = new device.Connection({ ...identity, pem: Buffer.from(body("activate-node").given.public_key, "base64").toString() });
  connection.call = async (name, content) => (sent.push([name, base64(content)]), new Uint8Array(0));
  const node = big(body("pull-messages").given.node);
  await connection.activate();
  await connection.heartbeat(node);
  await connection.pull(node);
  await connection.deactivate(node);
  for (const [name, content] of sent) check(name, content, body(name).body);
  for (const { name, body: content, expected } of read("transport").responses) {
    connection.call = async () => unbase64(content);
    if (name === "activate-node") check(name, (await connection.activate()).toString(16), expected.node);
    if (name === "send-node-heartbeat") check(name, await connection.heartbeat(node), expected.accepted);
    if (name === "pull-messages") check(name, [await connection.pull(node), connection.pollInterval], [null, expected.next_poll]);
  }
  const objects = objectsOf(exchange.objects), calls = [];
  const pulled = new device.PulledMessage(async (name, content) => (calls.push([name, base64(content)]), new Uint8Array(0)), unbase64(exchange["pull-messages"]));
  check("pulled", [pulled.run.toString(16), pulled.kind, pulled.id, pulled.deadline],
    [exchange.expected.run, exchange.expected.kind, exchange.expected.message, exchange.expected.created + exchange.expected.ttl]);
  const reply = await pulled.packReply(recordsOf(exchange.reply.records), exchange.reply.now, exchange.reply.seconds);
  check("push-messages", base64(reply.request), exchange["push-messages"]);
  check("pushed objects", [...reply.objects].map(([id, one]) => [id, base64(one)]).sort(), [...objects].map(([id, one]) => [id, base64(one)]).sort());
});

await during("uploads", async () => {
  const { scatter, histories, file_rows, cases } = read("uploads");
  for (const [number, expected] of scatter) check(`scatter ${number}`, device.scatter(BigInt(number)), expected);
  for (const { items, held_out } of histories) check(`held out of ${items}`, [...device.heldOutItems(items)].sort((a, b) => a - b), held_out);
  for (const [user, item, expected] of file_rows) check(`row ${user} ${item}`, await device.uniform(user, item), expected);
  for (const [length, exponent, expected] of read("uploads").pair_weight)
    check(`weight of ${length} by ${exponent}`, device.pairWeight(length, exponent), expected);
  for (const one of cases) {
    const users = one.users.map((items, place) => ({ items, states: [...one.states[place]], defaultQuality: 0, heldOut: [] }));
    const { sum, "sum.indices": indices } = device.upload(users, { ...one, most: one.most ?? undefined }), name = JSON.stringify([one.head, one.leading, one.most, one.share]);
    check(`${name}: sum`, Array.from(sum, (number) => number * 65536), one.sum_times_65536);
    check(`${name}: places`, indices && Array.from(indices), one.indices);
    check(`${name}: states`, users.map(({ states }) => states), one.states_after);
  }
});

const refusal = (make) => {
  try {
    return make() && "none";
  } catch ({ kind }) {
    return kind;
  }
};

await during("models", async () => {
  const { items, cases, lists } = read("models");
  for (const { tensors, projections, pair_weight, histories } of lists) {
    const coded = Object.fromEntries(Object.entries(tensors).map(([name, text]) => [name, unbase64(text)]));
    const made = () => new device.DeviceModel(coded, projections, pair_weight), count = projections.rows.shape[0];
    for (const { rows, items, scores } of histories) {
      const found = made().scores(rows, count);
      check(`pairs of ${rows} of ${count}`, items.map((item) => found[item]), scores, 1e-6);
    }
    if (!histories.length) check(`damaged pairs of ${count}`, refusal(made), "InvalidMessage");
  }
  for (const { file, leading, histories } of cases) {
    const { tensors, metadata } = await device.parseModel(unbase64(file)), settings = JSON.parse(metadata.settings);
    const coded = Object.fromEntries(Object.entries(tensors).map(([name, { bytes }]) => [name, bytes]));
    const model = new device.DeviceModel(coded, JSON.parse(metadata.projections), settings.algorithm.pair_weight);
    for (const { rows, scores, catalogue, best } of histories) {
      if (scores.length === items) check(`scores of ${rows}`, Array.from(model.scores(rows, items)), scores, 1e-6);
      const own = await device.recommend(unbase64(file), catalogue, best.length);
      // Items without a score are not recommended here; the rest is the vector's order, up to equal scores.
      check(`best of ${catalogue}`, own.map(([item]) => item), best.slice(0, own.length));
    }
    void leading;
  }
});

await during("signed", async () => {
  const { signer, messages } = read("signed"), { cases } = read("models"), store = new Memory();
  await store.put({ device: { id: "1", capacity: "1x", level: "plain", minCohort: 100, modelSigner: signer } });
  for (const { what, file, facts, stored } of messages) {
    const content = unbase64(cases[file].file), before = await store.get("model"), message = { facts: { version: 10, ...facts }, arrays: { file: content }, coded: {} };
    check(what, await new device.Device(store).reply("query.model", message).then(() => true, () => false), stored);
    if (stored) check(`${what}: stored`, base64((await store.get("model")).file), cases[file].file);
    else check(`${what}: the stored one stays`, await store.get("model"), before);
  }
});

await during("secure", async () => {
  const { keys, masks, shares, graph, fixed_point } = read("secure");
  check("public", hex(await device.publicOf(unhex(keys.secret))), keys.public);
  const secret = await device.secretKey(unhex(keys.secret)), common = await device.agree(secret, unhex(keys.other_public)), cohort = unhex(keys.cohort);
  check("common", hex(common), keys.common);
  check("low order", await device.agree(secret, unhex(keys.low_order_public_is_refused)).then(() => "agreed", () => "refused"), "refused");
  const [one, other] = [...keys.pair.members].sort((a, b) => a - b);
  check("pair", hex(await device.derived(common, cohort, "pair", keys.pair.segment, one, other)), keys.pair.key);
  check("own", hex(await device.derived(unhex(keys.own.seed), cohort, "own", keys.own.segment)), keys.own.key);
  check("commitment", hex(await device.derived(unhex(keys.commitment.seed), cohort, "commitment", keys.commitment.member)), keys.commitment.value);
  const { sender, receiver, content, box } = keys.sealed;
  check("seal", hex(await device.seal(common, cohort, sender, receiver, unhex(content))), box);
  check("unseal", hex(await device.unseal(common, cohort, sender, receiver, unhex(box))), content);
  check("unseal another's", await device.unseal(common, cohort, receiver, sender, unhex(box)), null);
  const masked = (numbers) => {
    for (const key of masks.plus) device.addMask(numbers, unhex(key), 1);
    for (const key of masks.minus) device.addMask(numbers, unhex(key), -1);
    return numbers;
  };
  check("masked", Array.from(masked(Uint32Array.from(masks.vector))), masks.masked);
  const counting = masked(Uint32Array.from({ length: masks.counting.length }, (_, number) => number));
  check("long mask", hex(await device.sha256(device.bytesOf(counting))), masks.counting.sha256);
  const factors = shares.factors.map(big);
  device.source.below = () => factors.shift();
  check("shares", device.split(unhex(shares.secret), shares.places, shares.threshold).map(hex), shares.shares);
  for (const [size, degree, threshold, staying, quorum] of graph.degrees)
    check(`degrees of ${size}`, [...Object.values(device.degrees(size)), device.quorum(size)], [degree, threshold, staying, quorum]);
  for (const { members, order, neighbors, survivors, isolated } of graph.rings) {
    const ring = await device.Ring.of(unhex(graph.cohort), [...Array(members).keys()]);
    check(`ring of ${members}`, ring.order, order);
    for (const [member, near] of Object.entries(neighbors)) check(`neighbors of ${member}`, ring.neighbors(Number(member)), near);
    check(`isolated of ${members}`, ring.isolated(new Set(survivors)), isolated);
  }
  check("ring of some", (await device.Ring.of(unhex(graph.cohort), graph.ring_of_some.members)).order, graph.ring_of_some.order);
  for (const { what, clients, weight, quality, users, sums, steps, encoded, clip } of fixed_point) {
    if (clip) continue; // of algorithms that a browser does not train
    const [each] = Object.values(steps ?? {});
    check(what, Array.from(device.encode({ sums, weight, quality, evaluated: users }, each ?? 1, clients)), encoded);
  }
});

await during("log", async () => {
  const { signer, devices } = read("secure").log;
  for (const own of devices) {
    const store = new Memory(), asked = [];
    await store.put({ device: { ...(await ownerOf({ ...own, capacity: "1x", min_cohort: 3 })), modelSigner: signer } });
    for (const { what, kind, message, log, draws, refused, reply, asked: expected } of own.steps) {
      drawAs(draws);
      const fetchLog = async (start) => (asked.push(start), device.utf8(log).slice(start));
      const facts = { version: 10, secure: unhex(message) };
      const taken = new device.Device(store, undefined, fetchLog).reply(kind, { facts, arrays: {}, coded: {} });
      check(what, await taken.then(({ reply: [[, { secure }]] }) => hex(secure), ({ given }) => given), refused || reply);
      check(`${what}: asked`, asked.splice(0), expected);
    }
  }
});

// -- whole runs ------------------------------------------------------------------------------------------------------

const shortened = (id) => id.replace(/^0+(?=.)/, "");

async function replay(name, given) {
  const store = new Memory(), { holdout, steps } = given;
  await store.put({ device: await ownerOf(given) });
  for (const [number, step] of steps.entries()) {
    const what = `${name}, step ${number}, ${step.kind}`;
    await giveFile(store, step, holdout);
    drawAs(step.draws);
    const { reply } = await new device.Device(store).reply(step.kind, device.parseRecords(step.message.id, objectsOf(step.message.objects)));
    const expected = device.parseRecords(step.reply.id, objectsOf(step.reply.objects));
    const own = reply.find(([key]) => key === "fairfold")[1];
    if (expected.facts.quality) { // a sum that is shown, not used: the worker ranks in single precision
      check(`${what}: quality`, [own.quality.value], [expected.facts.quality.value], 1e-6);
      own.quality = expected.facts.quality;
    }
    const made = new Map(), tree = await device.packRecords(reply, made);
    check(what, tree.id, step.reply.id);
    if (tree.id !== step.reply.id) check(`${what}: facts`, Object.entries(own).map(String), Object.entries(expected.facts).map(String));
    const state = await store.get("state"), { changed } = step;
    for (const [key, value] of Object.entries({ run: state?.run, numbering: state?.numbering, acknowledged: state?.acknowledged.id, pending: state?.pending?.id ?? null }))
      if (key in changed && state) check(`${what}: ${key}`, value, changed[key] === null ? null : shortened(changed[key]));
  }
}

for (const file of ["session", "secure_session"])
  for (const [number, one] of read(file).devices.entries()) await during(file, () => replay(`device ${number}`, one));

// -- messages that are broken ----------------------------------------------------------------------------------------

let seed = 12345;
const draw = (end) => (seed = (seed * 1103515245 + 12345) % 2 ** 31) % end;

function broken(objects) {
  const changed = new Map([...objects].map(([id, content]) => [id, content.slice()])), ids = [...changed.keys()];
  for (let times = 1 + draw(3); times--; ) {
    const id = ids[draw(ids.length)], content = changed.get(id), what = draw(4);
    if (what === 0) content[draw(content.length)] ^= 1 << draw(8);
    else if (what === 1) changed.set(id, content.slice(0, draw(content.length)));
    else if (what === 2) changed.set(id, device.join(content, content.slice(draw(content.length))));
    else changed.set(id, changed.get(ids[draw(ids.length)]).slice());
  }
  return changed;
}

async function refuses(given) {
  const store = new Memory(), { holdout, steps } = given;
  await store.put({ device: await ownerOf(given) });
  let refused = 0;
  for (const step of steps) {
    await giveFile(store, step, holdout);
    const objects = objectsOf(step.message.objects), before = structuredClone(store.parts);
    for (let number = 0; number < 25; number++) {
      drawAs(step.draws);
      try {
        await new device.Device(store).reply(step.kind, device.parseRecords(step.message.id, broken(objects)));
      } catch (error) {
        refused++;
        check(`${step.kind}: an error`, error instanceof Error, true);
        // A round of a secure sum ends with a refusal; all else is as it was.
        const kept = (parts) => [...parts.keys()].filter((part) => part !== "round");
        check(`${step.kind}: nothing is stored`, kept(store.parts), kept(before));
        for (const part of ["state", "memory"]) check(`${step.kind}: ${part} stays`, store.parts.get(part), before.get(part));
      }
      store.parts = structuredClone(before);
    }
    drawAs(step.draws);
    await new device.Device(store).reply(step.kind, device.parseRecords(step.message.id, objects)); // the whole message still serves
  }
  check("some were refused", refused > steps.length, true);
}

await during("fuzz", async () => {
  for (const file of ["session", "secure_session"]) await refuses(read(file).devices[0]);
  for (let number = 0; number < 5000; number++) {
    const content = Uint8Array.from({ length: draw(60) }, () => draw(256));
    for (const parse of [device.parseFields, (bytes) => device.parseCsv(String.fromCharCode(...bytes)), (bytes) => device.readRows([...bytes])])
      try {
        parse(content);
      } catch (error) {
        check("an error", error instanceof Error, true);
      }
  }
});

process.stdout.write(JSON.stringify(found));
