// What a browser device does when things fail: node browser_failures.mjs PARTS FOLDER; prints what differs, by group.
// A server of the fleet API in memory gives it the messages of a recorded run; what is not replied to is sent again.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const [, , built, folder] = process.argv;
createRequire(import.meta.url)(built);
const { base64, unbase64, utf8, join, hex, sha256, parseFields, Loop, Device } = globalThis.fairfold;
const { devices: [, given] } = JSON.parse(readFileSync(`${folder}/session.json`, "utf8"));
const KINDS = ["query.capacity", "query.statistics", "query.numbering", "train", "train", "train", "query.model"];
const steps = KINDS.map((kind, place) => {
  const of = given.steps.filter((step) => step.kind === kind);
  return kind === "query.model" ? of.at(-1) : of[KINDS.slice(0, place).filter((one) => one === kind).length];
}).filter(Boolean);

// Waiting takes no time, and nobody checks signatures here.
globalThis.setTimeout = (act) => setImmediate(act);
crypto.subtle.sign = async () => new ArrayBuffer(96);

const found = {};
let group = "";
function check(what, is, expected = true) {
  found[group] ??= { checked: 0, wrong: [] };
  found[group].checked++;
  const [one, other] = [is, expected].map((value) => JSON.stringify(value, (_, of) => (typeof of === "bigint" ? `${of}n` : of instanceof Map ? [...of] : of)));
  if (one !== other) found[group].wrong.push(`${what}: ${one?.slice(0, 300)}, not ${other?.slice(0, 300)}`);
}
async function during(name, body) {
  group = name;
  found[group] ??= { checked: 0, wrong: [] };
  await body().catch((error) => found[group].wrong.push(error.stack));
}

// -- protobuf, as a server writes it ---------------------------------------------------------------------------------

const varint = (number) => (number < 128 ? [number] : [(number & 127) | 128, ...varint(Math.floor(number / 128))]);
const numberOf = (field, number) => Uint8Array.from([field << 3, ...varint(number)]);
const bytesOf = (field, content) => join(Uint8Array.from([(field << 3) | 2, ...varint(content.length)]), content);
const doubleOf = (field, number) => join(Uint8Array.of((field << 3) | 1), new Uint8Array(Float64Array.of(number).buffer));
const textOf = (content) => Buffer.from(content ?? []).toString();

// -- a server and a store --------------------------------------------------------------------------------------------

class Store {
  parts = new Map();
  refuses = () => false; // puts, by their parts
  async get(part) {
    return structuredClone(this.parts.get(part));
  }
  async put(changed) {
    if (this.refuses(changed)) throw Object.assign(new Error("a disk that is full; needed: room for this device's state."), { name: "QuotaExceeded" });
    for (const [part, value] of Object.entries(changed)) value === null ? this.parts.delete(part) : this.parts.set(part, structuredClone(value));
  }
  // What must be the same however often it was interrupted.
  kept() {
    const { model, ...rest } = Object.fromEntries(["data", "state", "model", "memory", "served", "open"].map((part) => [part, this.parts.get(part)]));
    return { ...rest, model: model && base64(model.file) };
  }
}

class Server {
  waiting = [...steps]; // messages that have no good reply yet
  open = null; // the message that was pulled
  replies = []; // [id of the message, id of the reply, reason or ""], as they were announced
  taken = []; // ids of the records of good replies, in their order
  objects = new Map(); // of the open message
  missing = new Set(); // objects of the announced reply
  asked = []; // ids of objects
  requests = 0;
  created = 1;
  before = () => {}; // called before and after each request; a promise that it returns is waited for
  after = () => {};
  change = (step) => step;
  extra = []; // objects that a message has besides

  async announce() {
    const { kind, message } = this.change(this.waiting[0]), metadata = join(numberOf(1, 5), numberOf(3, 1), numberOf(4, 7), doubleOf(7, 1e6),
      bytesOf(8, utf8(kind)), doubleOf(9, this.created++)), body = bytesOf(1, metadata);
    const content = join(utf8(`Message ${message.id} ${body.length}\0`), body), id = hex(await sha256(content));
    this.objects = new Map(Object.entries(message.objects).map(([name, one]) => [name, unbase64(one)])).set(id, content);
    this.open = id;
    const tree = (name) => {
      const [, children] = textOf(this.objects.get(name).subarray(0, 1000)).split(" ");
      return join(bytesOf(1, utf8(name)), ...children.split(",").filter(Boolean).map((child) => bytesOf(2, tree(child))));
    };
    const more = this.extra.map(([name, one]) => (this.objects.set(name, one), bytesOf(2, bytesOf(1, utf8(name)))));
    return join(bytesOf(2, bytesOf(1, metadata)), bytesOf(3, join(tree(id), ...more)));
  }

  async respond(name, body) {
    const fields = parseFields(body);
    switch (name) {
      case "activate-node": return numberOf(1, 7);
      case "send-node-heartbeat": return numberOf(1, 1);
      case "pull-messages":
        // Flower gives a message once; one that was pulled and has no reply is lost with its page, and sent anew.
        return this.waiting.length ? this.announce() : new Promise(() => this.done());
      case "pull-object": {
        const id = textOf(fields.get(3)[0]);
        this.asked.push(id);
        return join(numberOf(1, 1), numberOf(2, 1), bytesOf(3, this.objects.get(id)));
      }
      case "confirm-message-received": return new Uint8Array(0);
      case "push-messages": {
        const [message] = fields.get(2), metadata = parseFields(parseFields(message).get(1)[0]), error = parseFields(message).get(3)?.[0];
        const [to, id] = [5, 2].map((field) => textOf(metadata.get(field)[0])), ids = [];
        const walk = (tree) => (ids.push(textOf(parseFields(tree).get(1)[0])), (parseFields(tree).get(2) ?? []).forEach(walk));
        walk(fields.get(3)[0]);
        if (!this.replies.some(([, one]) => one === id)) this.replies.push([to, id, error ? textOf(parseFields(error).get(2)[0]) : ""]);
        this.records = ids[1];
        this.missing = new Set(to === this.open && !error ? ids : []);
        return join(...ids.map((one) => bytesOf(3, utf8(one))), bytesOf(4, utf8("session")));
      }
      case "push-object": {
        const id = textOf(fields.get(3)[0]);
        check("an object is what its name says", hex(await sha256(fields.get(4)[0])), id);
        if (this.missing.delete(id) && !this.missing.size) this.taken.push(this.records), this.waiting.shift();
        return numberOf(1, 1);
      }
    }
    throw new Error(name);
  }
}

// Run pages on one store, each until the server has no message left or the page is ended; `ends` says which page ends at which request.
async function serve(server, store, { ends = () => Infinity, atMost = 6 } = {}) {
  const reports = [];
  let isDone = false;
  for (let page = 0; page < atMost && !isDone; page++) {
    await new Promise((resolve) => {
      let alive = true, requests = 0;
      const [at, when] = [ends(page)].flat(), never = () => new Promise(() => {});
      server.done = () => (isDone = true, resolve());
      globalThis.fetch = async (path, { body }) => {
        if (!alive) return never();
        server.requests++;
        const isLast = requests++ === at, end = () => (alive = false, resolve(), never());
        if (isLast && when === "before") return end();
        const refused = await server.before(path);
        if (refused) return refused;
        const response = await server.respond(path.split("/").pop(), new Uint8Array(body));
        return isLast ? end() : (await server.after(path)) ?? new Response(response);
      };
      const mine = { get: (part) => (alive ? store.get(part) : never()), put: (parts) => (alive ? store.put(parts) : never()) };
      void new Loop(mine, { ...identity }, (status, entry) => alive && reports.push([status.state, entry?.problem ?? status.message])).serve();
    });
  }
  return { reports, isDone };
}

const identity = { id: given.name.split("\n")[0], capacity: given.capacity, items: 60, level: "plain", minCohort: 100, pem: "key", key: {} };
async function newStore() {
  const store = new Store(), { parseCsv, histories } = globalThis.fairfold;
  const rows = parseCsv(given.steps.find((step) => step.file).file).map(({ user, item }) => [user, Number(item), item]);
  await store.put({ device: identity, data: await histories(rows, given.holdout) });
  return store;
}
const atMostOne = (server) => new Set(server.replies.map(([to]) => to)).size === server.replies.length;

const undisturbed = new Server(), first = await newStore();
await during("undisturbed", async () => {
  const { isDone } = await serve(undisturbed, first);
  check("all messages", [isDone, undisturbed.waiting.length, undisturbed.replies.length], [true, 0, steps.length]);
  check("kinds", new Set(steps.map((step) => step.kind)).size >= 4);
  check("replies", undisturbed.taken, steps.map((step) => step.reply.id));
  check("it has an update that the server has not acknowledged", Boolean((await first.get("state")).pending));
});

await during("a page ends at each request", async () => {
  let refusals = 0; // times that the next page sent that one was closed at work
  for (let at = 0; at < undisturbed.requests; at++)
    for (const when of ["before", "after"]) {
      const server = new Server(), store = await newStore();
      const { isDone } = await serve(server, store, { ends: (page) => (page ? Infinity : [at, when]) }), what = `request ${at}, ended ${when}`;
      check(`${what}: goes on`, isDone);
      check(`${what}: one reply to a message`, atMostOne(server));
      check(`${what}: state`, store.kept(), first.kept());
      check(`${what}: replies`, server.taken, undisturbed.taken);
      refusals += server.replies.some(([, , reason]) => reason.includes("a page that was closed at work"));
    }
  check("the next page says that one was closed at work", refusals > undisturbed.requests);
});

await during("a full disk", async () => {
  for (const [what, refuses] of Object.entries({ anything: () => true, "the state": (parts) => "state" in parts, "the model": (parts) => "model" in parts })) {
    const server = new Server(), store = await newStore(), before = store.kept();
    let failed = 0;
    store.refuses = (parts) => refuses(parts) && !("node" in parts) && !failed;
    const unchanged = [];
    server.before = () => {
      const errors = server.replies.filter(([, , reason]) => reason).length;
      if (errors && !failed) unchanged.push(refuses({ state: 0 }) ? store.kept().state === before.state : store.kept().model === before.model), failed++;
    };
    const { reports, isDone } = await serve(server, store), errors = server.replies.filter(([, , reason]) => reason);
    check(`${what}: goes on once there is space`, isDone);
    check(`${what}: an error`, errors.map(([, , reason]) => reason), ["InvalidState: QuotaExceeded on the device; needed: a device that can reply. Its own page has the details."]);
    check(`${what}: nothing is stored meanwhile`, unchanged, [true]);
    check(`${what}: a sentence`, reports.some(([, words]) => words.includes("a disk that is full")));
    check(`${what}: one reply to a message`, atMostOne(server));
    check(`${what}: state`, store.kept(), first.kept());
  }
});

await during("a wrong clock", async () => {
  for (const [minutes, words] of [[10, "600 s behind"], [-10, "600 s ahead of"]]) {
    const server = new Server(), store = await newStore(), before = store.kept();
    let times = 0;
    server.before = () => {
      if (times++) server.done();
      return new Response("", { status: 401, headers: { date: new Date(Date.now() + 60_000 * minutes + 500).toUTCString() } });
    };
    const { reports } = await serve(server, store);
    check("a sentence", reports.filter(([state]) => state === "refused").map(([, one]) => one.includes("clock") && one.includes("the server's. Set it")), [true]);
    check("how far", reports.some(([, one]) => one.includes(words) || one.includes(words.replace("600", "599"))));
    check("unchanged", store.kept(), before);
  }
});

await during("a server that is away for a while", async () => {
  for (let at = 0; at < undisturbed.requests; at += 3)
    for (const how of ["503", "no network", "a response that is lost"]) {
      const server = new Server(), store = await newStore();
      const away = () => server.requests > at && server.requests <= at + 4;
      const fail = () => {
        if (how === "503") return new Response("{\"detail\": \"busy\"}", { status: 503 });
        throw new TypeError("fetch failed");
      };
      if (how === "a response that is lost") server.after = () => (away() ? fail() : null);
      else server.before = () => (away() ? fail() : null);
      const { isDone } = await serve(server, store), what = `${how} from request ${at}`;
      check(`${what}: goes on`, isDone);
      check(`${what}: one reply to a message`, atMostOne(server));
      check(`${what}: state`, store.kept(), first.kept());
    }
});

await during("a repeated message", async () => {
  const server = new Server(), store = await newStore(), twice = steps.flatMap((step) => [step, step]);
  server.waiting = [...twice];
  const { isDone } = await serve(server, store);
  check("goes on", isDone);
  check("the same reply again, but for an update that was acknowledged meanwhile", server.taken, undisturbed.taken.flatMap((id) => [id, id]));
  check("state", store.kept(), first.kept());
});

await during("a message beyond the capacity", async () => {
  const server = new Server(), store = await newStore(), large = [1, 2].map((value) => new Uint8Array(6_000_000).fill(value));
  const names = await Promise.all(large.map(async (one) => hex(await sha256(one))));
  let state = null;
  server.before = () => {
    const isRefused = server.replies.some(([, , reason]) => reason);
    if (isRefused && server.extra.length) check("unchanged", store.kept().state, state);
    if (!isRefused) state = store.kept().state;
    server.extra = server.waiting[0]?.kind === "train" && !isRefused ? names.map((name, place) => [name, large[place]]) : [];
  };
  const { reports, isDone } = await serve(server, store);
  check("a sentence", reports.some(([, words]) => words.includes("a message that is too large; needed: at most")));
  check("it stops asking", names.filter((name) => server.asked.includes(name)).length, 1);
  check("it goes on", [isDone, store.kept()], [true, first.kept()]);
});

await during("rows that pass by", async () => {
  const store = await newStore(), { message } = steps.find(({ kind }) => kind === "train"), objects = new Map(Object.entries(message.objects).map(([id, one]) => [id, unbase64(one)]));
  const records = globalThis.fairfold.parseRecords(message.id, objects), before = store.kept();
  records.facts.context = JSON.stringify({ ...JSON.parse(records.facts.context), stream: { kind: "quantized rows" } });
  for (const [kind, given] of [["train", records], ["query.rows", { facts: { version: 10 }, arrays: {}, coded: {} }]]) {
    const error = await new Device(store).reply(kind, given).catch((one) => one);
    check(`${kind}: a sentence`, error.message, "a run with rows that pass by; needed: one of the default algorithm, which a browser computes. Use `fairfold node` for this run.");
  }
  check("unchanged", store.kept(), before);
});

await during("a server of another version", async () => {
  const { reply: [[, { version: own }]] } = await new Device(await newStore()).reply("query.capacity", { facts: {}, arrays: {}, coded: {} });
  for (const version of [own - 1, own + 1, `${own}`]) {
    const store = await newStore(), before = store.kept();
    for (const step of steps.filter(({ kind }) => kind !== "query.capacity")) {
      const records = { facts: { version }, arrays: {}, coded: {} };
      const error = await new Device(store).reply(step.kind, records).catch((one) => one);
      check(`${step.kind}: a sentence`, error.message?.includes("another version of the protocol"));
    }
    check("unchanged", store.kept(), before);
    const { reply } = await new Device(store).reply("query.capacity", { facts: { version }, arrays: {}, coded: {} });
    check("it says its own", reply[0][1].version, own);
  }
});

for (const one of Object.values(found)) one.wrong.length = Math.min(one.wrong.length, 20);
process.stdout.write(JSON.stringify(found), () => process.exit(0)); // pages that were ended wait for ever
