// Replies of this device to the messages of the default algorithm: fairfold.device.tasks.

import { hex, invalid, Refusal, sha256, join, unhex, utf8, type Bytes } from "./bytes";
import { uint, verified } from "./crypto";
import { fetchRoster } from "./link";
import type { FetchLog } from "./log";
import { DeviceModel, NEIGHBORS, packedBytes, PAIRS, POPULARITY, ROWS, type Projections } from "./model";
import { Double, type Facts } from "./protobuf";
import { parseJson, pythonJson, type Records, type Reply, type Vectors } from "./records";
import { beginSecure, refuse, secureStep, SecureReply } from "./secure";
import {
  LEVELS, newState, openHistories, reconcile, remembered, type Data, type Identity, type State, type Store, type StoredModel,
} from "./state";
import { report, triangleItems, partSize, upload, type Part, type UserHistory } from "./uploads";

export const VERSION = 10;
const MODEL_FORMAT = "8", MAX_HEAD = 2 ** 24, MAX_ITEMS = 2 ** 32, MAX_TEXT = 1 << 16, WINDOW = 1 << 18;
const AMOUNT = /^(\d+(?:\.\d+)?|\.\d+)\s*(x|×|b|[kmgt]i?b)$/i;

interface Task {
  model: DeviceModel | null;
  projections: Projections;
  context: Record<string, { kept: number[]; part?: Part }>;
  request: number[];
  items: number;
  top: number;
  facts: Facts;
  settings: any;
}
export interface Result {
  reply: Reply;
  shown?: { round: number; quality?: number; evaluated?: number }; // for the person
}

export function idIn(facts: Facts, key: string): string {
  const text = facts[key];
  if (typeof text !== "string" || !/^[0-9a-f]{1,16}$/.test(text)) throw invalid(`no ${key}`);
  return text.replace(/^0+(?=.)/, "");
}

function numberIn(facts: Facts, key: string, most: number, least = 0): number {
  const number = facts[key];
  if (typeof number !== "number" || number < least || number > most)
    throw invalid(`no ${key} in range`, `a number from ${least} to ${most}`);
  return number;
}

function tableIn(facts: Facts, key: string): any {
  const text = facts[key];
  if (typeof text !== "string" || text.length > MAX_TEXT) throw invalid(`no readable ${key}`);
  return parseJson(text);
}

function windowIn(facts: Facts): { items: number; start: number; stop: number } {
  const items = numberIn(facts, "items", MAX_ITEMS, 1), start = numberIn(facts, "start", items - 1);
  return { items, start, stop: numberIn(facts, "stop", Math.min(items, start + WINDOW), start + 1) };
}

// Bytes that a device of some capacity may hold of what takes `full` bytes in a device of 1x.
export function budget(capacity: string, full: number): number {
  const [, amount, unit] = AMOUNT.exec(capacity.trim()) ?? [];
  if (!amount || !unit) throw new Refusal("InvalidCapacity", `a capacity of ${capacity}`, "a size such as 16x or 500 kB");
  const letter = unit.toLowerCase();
  if (letter === "x" || letter === "×") return Math.floor(full / Number(amount));
  return Math.floor(Number(amount) * (letter[1] === "i" ? 1024 : 1000) ** " kmgt".indexOf(letter.length > 1 ? letter[0]! : " "));
}

// The most bytes that are fetched of a message: of one with a model by the capacity, with rows of at most 1,024 numbers.
export const mostBytes = ({ capacity, items }: Identity, kind: string): number =>
  /train|evaluate|model/.test(kind) ? budget(capacity, 4096 * items) + 16 * items + (1 << 22) : 1 << 27;

export class Device {
  constructor(
    readonly store: Store,
    readonly tick: () => Promise<void> = async () => {},
    readonly fetchLog: FetchLog = fetchRoster,
  ) {}

  private inRound = false; // of secure aggregation

  // The reply to a message; what the device would remember of it is stored before it is returned.
  async reply(kind: string, records: Records): Promise<Result> {
    this.inRound = false;
    try {
      return await this.carryOut(kind, records);
    } catch (error) {
      if (this.inRound) await this.store.put({ round: null }); // no second reply to its request
      throw error instanceof TypeError || error instanceof RangeError ? invalid(`a message that cannot be carried out (${error.message})`) : error;
    }
  }

  private async carryOut(kind: string, records: Records): Promise<Result> {
    const { facts } = records, me = (await this.store.get<Identity>("device"))!;
    if (kind !== "query.capacity" && facts.version !== VERSION)
      throw invalid("another version of the protocol", `version ${VERSION}: reload this page to have the server's own`);
    switch (kind) {
      case "query.capacity":
        return { reply: [["fairfold", { version: VERSION, capacity: me.capacity, number: -1, name: me.id }]] };
      case "query.statistics": return this.statistics(records, me);
      case "query.numbering": return this.numbering(records);
      case "query.model": return this.model(records, me);
      case "query.rows": throw otherAlgorithm(PASSING);
      case "train": return this.train(records, me);
      case "evaluate": return this.evaluate(records, me);
      case "query.secure_keys":
        return secureFacts(await beginSecure(this.store, me, secureIn(facts), this.fetchLog));
      case "query.secure_shares": case "query.secure_sign": case "query.secure_reveal":
        return secureFacts(await secureStep(this.store, me, kind, secureIn(facts)));
      default:
        throw invalid(`a message of kind ${kind.slice(0, 40)}`);
    }
  }

  private async data(): Promise<Data> {
    return (await this.store.get<Data>("data")) ?? { train: {}, heldOut: {} };
  }

  private async state(): Promise<State> {
    return (await this.store.get<State>("state")) ?? newState();
  }

  private async statistics({ facts }: Records, me: Identity): Promise<Result> {
    const settings = tableIn(facts, "settings");
    requireDefault(settings, facts);
    const { start, stop, items } = windowIn(facts), masked = await this.masked(me, settings, facts, ["statistics", start, null]);
    const histories = Object.values((await this.data()).train), counts = new Float64Array(stop - start);
    requireKnown(histories, items);
    for (const history of histories) for (const item of history) if (item >= start && item < stop) counts[item - start]!++;
    const sums: Vectors = { counts };
    if (start === 0) {
      const lengths = histories.map((history) => history.length), total = (numbers: number[]) => numbers.reduce((a, b) => a + b, 0);
      sums.users = Float64Array.of(lengths.length, total(lengths), total(lengths.map((length) => partSize(length))));
    }
    if (masked) return { reply: await masked.statistics({ sums, weight: histories.length }) };
    return { reply: [["arrays", sums], ["fairfold", { version: VERSION, weight: new Double(histories.length) }]] };
  }

  private async numbering({ facts, arrays }: Records): Promise<Result> {
    if (facts.ratings === true) throw otherAlgorithm("a run with ratings");
    const { items, start, stop } = windowIn(facts), numbers = arrays.numbers;
    if (!(numbers instanceof BigInt64Array) || numbers.length !== stop - start)
      throw invalid("other numbers than were announced");
    if (numbers.some((number) => number < 0n || number >= BigInt(items)))
      throw invalid("numbers beyond the catalogue");
    const state = await this.state(), numbering = idIn(facts, "numbering"), { train, heldOut } = await this.data();
    const known = new Map(state.numbering === numbering ? state.numbers : []);
    const histories = [...Object.values(train), ...Object.values(heldOut)];
    requireKnown(histories, items);
    for (const history of histories)
      for (const item of history) if (item >= start && item < stop) known.set(item, Number(numbers[item - start]!));
    await this.store.put({ state: { ...state, numbering, numbers: known } });
    return { reply: [["fairfold", { version: VERSION }]] };
  }

  private async model({ facts, arrays }: Records, me: Identity): Promise<Result> {
    const file = arrays.file as Bytes, number = me.modelSigner && (await this.signedNumber(facts, file, me.modelSigner));
    const { tensors, metadata } = await parseModel(file);
    const size = Object.entries(tensors).reduce((sum, [name, { bytes }]) => sum + (name === "leading" ? 0 : bytes.length), 0);
    if (/b/i.test(me.capacity) && size > budget(me.capacity, 0))
      throw new Refusal("InvalidMessage", `a model of ${size} bytes`, `at most ${me.capacity}`, "Request its capacity first.");
    await this.store.put({ model: { file, number, round: Number(metadata.round), at: Date.now() } });
    return { reply: [["fairfold", { version: VERSION }]] };
  }

  // The number of a model that the server has signed; refused where it is below that of the stored one.
  private async signedNumber(facts: Facts, file: Bytes, signer: string): Promise<string> {
    const number = idIn(facts, "number"), signed = join(utf8("fairfold model"), uint(BigInt("0x" + number), 8), await sha256(file));
    const refusal = (given: string) => new Refusal("InvalidMessage", given, "a newer one that this device's server has signed", "The stored one is kept.");
    if (!(await verified(unhex(signer), unhex(String(facts.signature)), signed))) throw refusal("a model without its server's signature");
    const stored = (await this.store.get<StoredModel>("model"))?.number;
    if (stored && BigInt("0x" + number) < BigInt("0x" + stored)) throw refusal("an older model than the stored one");
    return number;
  }

  // -- tasks ---------------------------------------------------------------------------------------------------------

  private async train(records: Records, me: Identity): Promise<Result> {
    const { facts } = records, settings = tableIn(facts, "settings");
    const evaluates = facts.evaluate === true, task = this.task(records, me, settings, evaluates);
    const masked = await this.masked(me, settings, facts, ["train", Number(facts.round), BigInt("0x" + idIn(facts, "run"))]);
    const { state, users } = await this.open(facts, task);
    const quality = evaluates ? await this.quality(task, users) : null;
    const [share, candidate, reporting, most] = task.request as [number, number, number, number];
    const size = task.context.sum?.kept[0] ?? 0, head = task.projections[ROWS]!.shape[0];
    const sums = task.context.quality
      ? await report(users.values(), task.model!, {
          isDefault: candidate === 0, share: reporting, catalogue: task.items, top: task.top, tick: this.tick,
        })
      : upload(users.values(), { head, leading: triangleItems(size), share, exponent: settings.algorithm.history_exponent, part: task.context.sum?.part, ...(!masked && { most }) });
    await this.store.put({ state: { ...state, pending: remembered(idIn(facts, "update_id"), users) } });
    const shown = { round: Number(facts.round), ...quality };
    if (masked) return { reply: await masked.train({ sums, weight: users.size, ...quality }), shown };
    const fixed: Facts = {
      version: VERSION, run: facts.run!, update_id: facts.update_id!, weight: new Double(users.size), scales: Object.keys(task.context).map(() => 1),
    };
    return { reply: [["arrays", sums], ["fairfold", { ...fixed, ...qualityFacts(quality) }]], shown };
  }

  private async evaluate(records: Records, me: Identity): Promise<Result> {
    const { facts } = records, settings = tableIn(facts, "settings"), task = this.task(records, me, settings, true);
    const masked = await this.masked(me, settings, facts, ["evaluate", Number(facts.round), BigInt("0x" + idIn(facts, "run"))]);
    const { users } = await this.open(facts, task), quality = await this.quality(task, users);
    const shown = { round: Number(facts.round), ...quality };
    if (masked) return { reply: await masked.quality({ sums: {}, weight: 0, ...quality }), shown };
    const fixed: Facts = { version: VERSION, run: facts.run!, update_id: facts.update_id!, weight: new Double(0), scales: [] };
    return { reply: [["arrays", {}], ["fairfold", { ...fixed, ...qualityFacts(quality) }]], shown };
  }

  private task({ facts, arrays, coded }: Records, me: Identity, settings: any, evaluates: boolean): Task {
    requireDefault(settings, facts);
    const projections: Projections = tableIn(facts, "projections"), context = tableIn(facts, "context");
    if (context.stream) throw otherAlgorithm(PASSING);
    const items = numberIn(facts, "items", MAX_ITEMS, 1), names = Object.keys(projections).filter((name) => name !== NEIGHBORS).sort();
    if (names.join() !== [PAIRS, POPULARITY, ROWS].join() || !["sum", "quality"].includes(Object.keys(context).join()))
      throw invalid("other tensors than the model's");
    const head = projections[ROWS]!.shape[0];
    if (!(head >= 1 && head <= Math.min(items, MAX_HEAD, settings.algorithm.max_items)))
      throw invalid("a model of more items than the catalogue", `at most ${items}`);
    if ([PAIRS, NEIGHBORS].some((name) => projections[name] && projections[name]!.items !== head))
      throw invalid("a list of pairs of unknown items");
    let size = 0;
    for (const [name, held] of Object.entries(projections)) {
      size += packedBytes(held);
      if (!(coded[name] instanceof Uint8Array) || coded[name].length !== packedBytes(held))
        throw invalid("tensors of other lengths than their sizes");
    }
    if (size > budget(me.capacity, items * settings.subspace.reference_factors * 4))
      throw new Refusal("InvalidCapacity", `a task of ${size} bytes`, `at most ${me.capacity}`, "Ask this device first.");
    const scale = Array.isArray(facts.scales) ? facts.scales[0] : undefined;
    const request = Array.from((arrays.request as Float32Array) ?? [], (number) => number * (scale ?? NaN));
    if (request.length !== 4 || !request.every(Number.isFinite) || request[3]! < 0)
      throw invalid("a request that is no four numbers");
    const kept = context.sum ? context.sum.kept?.[0] : 0;
    const [part, parts] = context.sum?.part ?? [0, 1];
    if (!Number.isInteger(kept) || kept < 0 || kept > partSize(head) || !(part >= 0 && part < parts && parts <= 16))
      throw invalid("a sum of more pairs than items have", `at most ${partSize(head)}`);
    const model = evaluates || context.quality
      ? new DeviceModel(coded as Record<string, Uint8Array>, projections, settings.algorithm.pair_weight) : null;
    return { model, projections, context, request, items, top: settings.run.top, facts, settings };
  }

  private async open(facts: Facts, task: Task): Promise<{ state: State; users: Map<string, UserHistory> }> {
    const state = reconcile(await this.state(), idIn(facts, "run"), idIn(facts, "acknowledged_id")), data = await this.data();
    requireKnown([...Object.values(data.train), ...Object.values(data.heldOut)], task.items);
    return { state, users: openHistories(state, data, idIn(facts, "numbering")) };
  }

  // Sum of NDCG over the users with held-out items, and their number; null without any.
  private async quality(task: Task, users: Map<string, UserHistory>): Promise<{ quality: number; evaluated: number } | null> {
    let quality = 0, evaluated = 0;
    for (const user of users.values()) {
      if (!user.heldOut.length) continue;
      await this.tick();
      quality += task.model!.ndcg(user.items, user.heldOut, task.items, Math.min(task.top, task.items), user.items.length);
      evaluated++;
    }
    return evaluated ? { quality, evaluated } : null;
  }

  // How to mask the reply to a request; null for a plain reply, where this device gives one.
  private async masked(me: Identity, settings: any, facts: Facts, key: [string, number, bigint | null]): Promise<SecureReply | null> {
    const level = settings.privacy?.level, served = (await this.store.get<string>("served")) ?? "plain";
    const accepted = LEVELS[Math.max(LEVELS.indexOf(me.level), LEVELS.indexOf(served))]!;
    if (level === "private" || accepted === "private") throw refuse("a sum with noise", "a run that is plain or secure, in a browser");
    if ((level === "secure") !== "secure" in facts) throw refuse("settings and a message that contradict each other", "a secure sum, or none");
    if (level === "secure") {
      const opened = await SecureReply.open(this.store, me, secureIn(facts), key, settings);
      this.inRound = true;
      return opened;
    }
    if (level !== "plain") throw invalid("an unknown level of privacy");
    if (accepted !== "plain") throw refuse("a request for a reply without masks", `secure sums alone (privacy=${accepted})`);
    return null;
  }
}

const qualityFacts = (quality: { quality: number; evaluated: number } | null): Facts =>
  quality ? { quality: new Double(quality.quality), evaluated: quality.evaluated } : {};

const secureFacts = (message: Bytes): Result => ({ reply: [["fairfold", { version: VERSION, secure: message }]] });

function secureIn(facts: Facts): Bytes {
  if (facts.secure instanceof Uint8Array && facts.secure.length <= 1 << 26) return facts.secure;
  throw invalid("no message of secure aggregation");
}

function requireDefault(settings: any, facts: Facts): void {
  if (settings?.algorithm?.kind !== "co_occurrence" || "image_shape" in facts) throw otherAlgorithm(`a run of ${String(settings?.algorithm?.kind).slice(0, 40)}`);
}

// What a browser does not compute needs a program: refused with words, so that the server goes on without this device.
const PASSING = "a run with rows that pass by";
const otherAlgorithm = (what: string): Refusal =>
  new Refusal("RequestRefused", what, "one of the default algorithm, which a browser computes", "Use `fairfold node` for this run.");

function requireKnown(histories: number[][], items: number): void {
  for (const history of histories) {
    const last = history[history.length - 1];
    if (last !== undefined && last >= items)
      throw new Refusal("InvalidData", `item ${last}`, `numbers from 0 to ${items - 1}`, "The catalogue has changed: leave, and join anew.");
  }
}

// -- the model file (docs/export.md) -----------------------------------------------------------------------------------

interface ModelFile {
  tensors: Record<string, { dtype: string; shape: number[]; bytes: Bytes }>;
  metadata: Record<string, string>;
}

export async function parseModel(file: Bytes | undefined): Promise<ModelFile> {
  const length = file && file.length > 8 ? Number(new DataView(file.buffer, file.byteOffset).getBigUint64(0, true)) : Infinity;
  if (!file || length > file.length - 8) throw invalid("a model file that is cut off");
  const { __metadata__: metadata, ...described } = parseJson(file.subarray(8, 8 + length));
  const tensors: ModelFile["tensors"] = {}, names = Object.keys(described).sort();
  for (const name of names) {
    const { dtype, shape, data_offsets: [start, stop] } = described[name];
    tensors[name] = { dtype, shape, bytes: file.subarray(8 + length + start, 8 + length + stop) };
  }
  const { sha256: checksum, ...rest } = metadata, shapes = names.map((name) => [name, [tensors[name]!.dtype, tensors[name]!.shape]]);
  const sealed = join(utf8(pythonJson([rest, Object.fromEntries(shapes)], true)), ...names.map((name) => tensors[name]!.bytes));
  if (hex(await sha256(sealed)) !== checksum) throw invalid("a model with another checksum than it says");
  if (rest.format !== MODEL_FORMAT) throw invalid(`a model of format ${String(rest.format).slice(0, 20)}`);
  for (const [name, held] of Object.entries(parseJson(rest.projections) as Projections))
    if (held.kind.startsWith("quantized") && tensors[name]?.bytes.length !== packedBytes(held))
      throw invalid("tensors of other lengths than their sizes");
  return { tensors, metadata: rest };
}

// The best items outside a history, by their numbers in the catalogue, from the model's file alone: without a network.
export async function recommend(file: Bytes, history: number[], top: number): Promise<[number, number][]> {
  const { tensors, metadata } = await parseModel(file), settings = parseJson(metadata.settings!);
  if (settings.algorithm.kind !== "co_occurrence") throw otherAlgorithm(`a model of ${settings.algorithm.kind}`);
  const coded = Object.fromEntries(Object.entries(tensors).map(([name, { bytes }]) => [name, bytes]));
  const model = new DeviceModel(coded, parseJson(metadata.projections!), settings.algorithm.pair_weight);
  const { leading } = tensors, buffer = leading?.bytes.slice().buffer;
  const catalogue = !leading ? null : leading.dtype === "I64" ? Array.from(new BigInt64Array(buffer!), Number) : Array.from(new Int32Array(buffer!));
  const rank = catalogue && new Map(catalogue.map((item, place) => [item, place]));
  const own = rank ? history.flatMap((item) => rank.get(item) ?? []) : history;
  if (!own.some((item) => item < model.reach)) return []; // the model knows none of its items
  const count = Math.min(model.reach, catalogue?.length ?? Infinity);
  return model.best(own, count, top).map(([item, score]) => [catalogue ? catalogue[item]! : item, score]);
}
