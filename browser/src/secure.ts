// The client's side of secure aggregation (fairfold.privacy.secure): a state machine that answers one message after
// another, or refuses: advertise → share → receive → mask → sign → reveal. What it must not forget is stored first.

import { bytesOf, equal, hex, join, Refusal, sha256, utf8, type Bytes } from "./bytes";
import {
  addMask, agree, bigOf, derived, enrolledKey, enrolledPoint, publicOf, quorum, refuse, Ring, seal, secretKey, SHARE_BYTES, source, split,
  uint, unseal, verified,
} from "./crypto";
import { follow, NO_LOG, requireMembers, type FetchLog, type LogHead } from "./log";
import type { Reply, Vectors } from "./records";
import type { Identity, Store } from "./state";
import { rounded } from "./uploads";

export { refuse };
const MAGIC = utf8("fairsum"), VERSION = 4, PROTOCOL = 10;
const POINT = 49, KEY = 32, SIGNATURE = 64, CERTIFICATE = 96, DIGEST = 32, SEALED = 2 * SHARE_BYTES + 16;
const SEED = 0, MASK_KEY = 1, MAX_CLIENTS = 1 << 16, MAX_SEGMENTS = 4096, MAX_SIZES = 256, MAX_LENGTH = 2 ** 34;
const SESSION = 1, ADVERT = 2, COHORT = 3, SHARES = 4, DELIVERY = 5, MASKED = 6, SURVIVORS = 7, SIGNED = 8, SIGNATURES = 9, REVEALED = 10;
const STEPS = ["advertised", "shared", "received", "masked", "signed", "revealed"] as const;
type Step = (typeof STEPS)[number];

const unreadable = (given: string): Refusal =>
  new Refusal("InvalidMessage", given, "a message of secure aggregation", "Both sides must run the same fairfold.");

// -- messages --------------------------------------------------------------------------------------------------------

class Reader {
  private at = 0;
  constructor(private readonly data: Bytes) {}

  take(size: number): Bytes {
    if (this.at + size > this.data.length) throw unreadable("a message that ends too early");
    return this.data.slice(this.at, (this.at += size));
  }

  big(size: number, most: bigint): bigint {
    const value = bigOf(this.take(size));
    if (value > most) throw unreadable(`${value} out of range`);
    return value;
  }

  number(size: number, most: number, least = 0): number {
    const value = Number(this.big(size, BigInt(most)));
    if (value < least) throw unreadable(`${value} out of range`);
    return value;
  }

  // The number of parts that follow, each of some bytes; never more than there are bytes for.
  count(size: number, most: number): number {
    const parts = this.number(4, most);
    if (parts * size > this.data.length - this.at) throw unreadable("fewer parts than announced");
    return parts;
  }

  byMember(size: number): Map<number, Bytes> {
    const parts = this.count(4 + size, MAX_CLIENTS), found = new Map<number, Bytes>();
    for (let part = 0; part < parts; part++) found.set(this.number(4, MAX_CLIENTS), this.take(size));
    if (found.size < parts) throw unreadable("two parts for one member");
    return found;
  }

  members(): { members: Set<number>; cohort: number } {
    const cohort = this.number(4, MAX_CLIENTS, 1), bits = this.take((cohort + 7) >> 3), members = new Set<number>();
    for (let member = 0; member < 8 * bits.length; member++)
      if ((bits[member >> 3]! >> (7 - (member & 7))) & 1) {
        if (member >= cohort) throw unreadable("members beyond the cohort");
        members.add(member);
      }
    return { members, cohort };
  }

  end(): void {
    if (this.at < this.data.length) throw unreadable("more than a message has");
  }
}

function packMembers(members: Set<number>, cohort: number): Bytes {
  const bits = new Uint8Array((cohort + 7) >> 3);
  for (const member of members) bits[member >> 3]! |= 128 >> (member & 7);
  return join(uint(cohort, 4), bits);
}

const packByMember = (parts: Map<number, Bytes>): Bytes =>
  join(uint(parts.size, 4), ...[...parts].flatMap(([member, part]) => [uint(member, 4), part]));

const packed = (kind: number, session: Bytes, body: Bytes): Bytes =>
  join(MAGIC, Uint8Array.of(VERSION, kind), session, body);

// A message's body, which must be of one kind and belong to a session.
function open(kind: number, message: Bytes, session: Bytes | null): { reader: Reader; digest: Bytes } {
  const head = new Reader(message);
  if (!equal(head.take(MAGIC.length), MAGIC)) throw unreadable("no message of secure aggregation");
  const version = head.number(1, 255);
  if (version !== VERSION) throw unreadable(`a message of version ${version} where this is version ${VERSION}`);
  if (head.number(1, 255) !== kind) throw unreadable(`another message than number ${kind}`);
  const digest = head.take(DIGEST);
  if (session && !equal(digest, session)) throw unreadable("a message of another run, round or sum");
  return { reader: new Reader(message.subarray(MAGIC.length + 2 + DIGEST)), digest };
}

export interface Session {
  digest: Bytes;
  run: bigint;
  round: bigint;
  turn: bigint;
  minCohort: number;
  staying: number;
  sigma: number;
  purpose: string;
  lengths: number[]; // of every segment
  sizes: number[][]; // the segments of every size, smallest first, as they lie in its vector
  log: LogHead; // of enrolled keys, as all devices of the sum are shown it
}

export async function parseSession(message: Bytes): Promise<Session> {
  const { reader, digest } = open(SESSION, message, null);
  const own = await sha256(join(utf8("fairfold session"), message.subarray(MAGIC.length + 2 + DIGEST)));
  const most = 2n ** 63n, run = reader.big(8, 2n ** 64n - 1n), round = reader.big(8, most), turn = reader.big(8, most);
  const minCohort = reader.number(4, MAX_CLIENTS, 2), staying = reader.number(1, 100);
  const sigma = new DataView(reader.take(8).buffer).getFloat64(0);
  if (!(Number.isFinite(sigma) && sigma >= 0)) throw unreadable("noise that is none");
  const purpose = String.fromCharCode(...reader.take(reader.number(1, 32, 1)));
  if (!/^[A-Za-z_]\w*$/.test(purpose)) throw unreadable("a purpose that is no name");
  const lengths = Array.from({ length: reader.count(8, MAX_SEGMENTS) }, () => reader.number(8, MAX_LENGTH));
  const sizes = Array.from({ length: reader.count(4, MAX_SIZES) }, () =>
    Array.from({ length: reader.count(2, MAX_SEGMENTS) }, () => reader.number(2, MAX_SEGMENTS - 1)));
  const log = { lines: reader.number(4, 2 ** 32 - 1), hash: hex(reader.take(DIGEST)) };
  if (!log.lines && log.hash !== NO_LOG) throw unreadable("the hash of no line");
  reader.end();
  const total = lengths.reduce((sum, length) => sum + length, 0);
  if (!lengths.length || !sizes.length || !total || total > MAX_LENGTH) throw unreadable("segments of no length, or of too great a length");
  if (sizes.some((owned) => !owned.length || new Set(owned).size < owned.length || owned.some((one) => one >= lengths.length)))
    throw unreadable("a size of unknown or repeated segments");
  if (!equal(own, digest)) throw unreadable("an invitation that contradicts itself");
  return { digest, run, round, turn, minCohort, staying, sigma, purpose, lengths, sizes, log };
}

interface Advert {
  name: string;
  enrolled: Bytes;
  signer: Bytes;
  certificate: Bytes;
  maskKey: Bytes;
  shareKey: Bytes;
  signature: Bytes;
  body: Bytes;
}
const ADVERT_BYTES = 8 + POINT + KEY + CERTIFICATE + 3 * KEY + SIGNATURE;

function readAdvert(reader: Reader): Advert {
  const body = reader.take(ADVERT_BYTES), parts = new Reader(body), name = hex(parts.take(8));
  const [enrolled, signer, certificate, maskKey, shareKey, , signature] =
    [POINT, KEY, CERTIFICATE, KEY, KEY, KEY, SIGNATURE].map((size) => parts.take(size)) as [Bytes, Bytes, Bytes, Bytes, Bytes, Bytes, Bytes];
  return { name, enrolled, signer, certificate, maskKey, shareKey, signature, body };
}

const advertSigned = (session: Bytes, body: Bytes): Bytes =>
  join(utf8("fairfold advert"), session, body.subarray(0, ADVERT_BYTES - SIGNATURE));

interface Cohort {
  digest: Bytes;
  members: Advert[];
  sizes: number[];
  place: number; // the device's own
}

// -- layout of the vectors -------------------------------------------------------------------------------------------

const vectorLength = ({ lengths, sizes }: Session, size: number): number =>
  sizes[size]!.reduce((sum, segment) => sum + lengths[segment]!, 0);

// The members that own each segment, among some.
function owners({ sizes: all }: Session, sizes: number[], among: (member: number) => boolean = () => true): Map<number, number[]> {
  const found = new Map<number, number[]>();
  sizes.forEach((size, member) => {
    if (!among(member)) return;
    for (const segment of all[size]!) found.set(segment, [...(found.get(segment) ?? []), member]);
  });
  return found;
}

// -- what a device remembers -----------------------------------------------------------------------------------------

// Part "round": the open round, with its secrets; removed when it is over, refused, or replaced by the next.
interface Round {
  step: Step;
  session: Session;
  advert: Bytes;
  shareSecret: CryptoKey; // cannot be exported; the other two are shared among neighbors, as bytes
  maskSecret: Bytes;
  seed: Bytes;
  cohort: Cohort | null;
  sharing: Set<number>;
  survivors: Set<number> | null;
  received: Map<number, Bytes>; // both shares of each member that gave them
}

// Part "memory": what outlives a round.
interface Memory {
  turns: Map<string, bigint>; // by run and purpose: the last in which it gave shares
  seen: Map<string, string>; // the first enrolled key of every name: the server is trusted on who is enrolled
  checked: Set<string>; // digests of certificates that were verified before
}

const minCohort = (round: Round, me: Identity): number => Math.max(round.session.minCohort, me.minCohort);
const memoryOf = async (store: Store): Promise<Memory> =>
  (await store.get<Memory>("memory")) ?? { turns: new Map(), seen: new Map(), checked: new Set() };

function requireNew({ session }: Round, memory: Memory): void {
  const last = memory.turns.get(`${session.run} ${session.purpose}`) ?? -1n;
  if (session.turn <= last)
    throw refuse(`${session.purpose} ${session.round}, turn ${session.turn} again, after ${last} (a repeated cohort)`, "a later turn");
}

// Accept an invitation: open a new round, and return the device's advert.
export async function beginSecure(store: Store, me: Identity, invitation: Bytes, fetchLog: FetchLog): Promise<Bytes> {
  const session = await parseSession(invitation);
  if (session.sigma) throw refuse("a sum with noise", "a run that is plain or secure, in a browser");
  const maskSecret = source.bytes(KEY), shareSecret = source.bytes(KEY), seed = source.bytes(KEY);
  const enrolled = await enrolledPoint(me.key.publicKey);
  const signer = new Uint8Array(await crypto.subtle.exportKey("raw", me.signer.publicKey));
  const unsigned = join(uint(BigInt("0x" + me.id), 8), enrolled, signer, me.certificate, await publicOf(maskSecret),
    await publicOf(shareSecret), source.bytes(KEY), new Uint8Array(SIGNATURE));
  const signature = await crypto.subtle.sign("Ed25519", me.signer.privateKey, advertSigned(session.digest, unsigned));
  const advert = join(unsigned.subarray(0, ADVERT_BYTES - SIGNATURE), new Uint8Array(signature));
  const round: Round = {
    step: "advertised", session, advert, shareSecret: await secretKey(shareSecret), maskSecret, seed,
    cohort: null, sharing: new Set(), survivors: null, received: new Map(),
  };
  requireNew(round, await memoryOf(store));
  if (me.modelSigner) await follow(store, session.log, me.modelSigner, enrolled, fetchLog);
  await store.put({ round });
  return packed(ADVERT, session.digest, advert);
}

// The open round for one step: stored afterwards, or removed if it is over or the step was refused.
async function inRound<T>(store: Store, message: Bytes, step: (round: Round) => Promise<T>): Promise<T> {
  const round = await store.get<Round | null>("round");
  if (!round) throw refuse("a message of a round that this device has not open", "an invitation first");
  if (!equal(message.subarray(MAGIC.length + 2, MAGIC.length + 2 + DIGEST), round.session.digest))
    throw refuse("a message of another round than is open", "one of this round");
  try {
    return await step(round);
  } catch (error) {
    await store.put({ round: null });
    throw error;
  }
}

export const secureStep = (store: Store, me: Identity, kind: string, message: Bytes): Promise<Bytes> =>
  inRound(store, message, async (round) => {
    if (kind === "query.secure_shares") return share(store, me, round, message);
    const reply = kind === "query.secure_sign" ? await sign(me, round, message) : await reveal(round, message);
    await store.put({ round: round.step === "revealed" ? null : round });
    return reply;
  });

function requireStep(round: Round, step: Step, asked: string): void {
  if (round.step !== step) throw refuse(`${asked} after it has ${round.step}`, `one after it has ${step}`);
}

async function share(store: Store, me: Identity, round: Round, message: Bytes): Promise<Bytes> {
  const { session } = round, { reader } = open(COHORT, message, session.digest), members: Advert[] = [], sizes: number[] = [];
  for (let left = reader.count(ADVERT_BYTES + 1, MAX_CLIENTS); left--; ) {
    members.push(readAdvert(reader));
    sizes.push(reader.number(1, MAX_SIZES - 1));
  }
  reader.end();
  const memory = await memoryOf(store), least = minCohort(round, me);
  requireStep(round, "advertised", "a second cohort for one round");
  requireNew(round, memory);
  const place = members.findIndex(({ body }) => equal(body, round.advert));
  if (members.length < least) throw refuse(`a cohort of ${members.length} devices`, `at least ${least}`);
  if (place < 0) throw refuse("a cohort without this device, or with other keys of it", "one that it takes part in");
  if (Math.max(...sizes) >= session.sizes.length) throw refuse("a size that there is not", `one of ${session.sizes.length}`);
  for (const [segment, those] of owners(session, sizes))
    if (those.length < least) throw refuse(`a segment (${segment}) that ${those.length} devices have`, `at least ${least}`);
  await checkTrust(memory, session.digest, members);
  if (me.modelSigner) await requireMembers(store, session.log, members);
  const digest = await sha256(join(utf8("fairfold cohort"), session.digest, message.subarray(MAGIC.length + 2 + DIGEST)));
  round.cohort = { digest, members, sizes, place };
  round.step = "shared";
  memory.turns.set(`${session.run} ${session.purpose}`, session.turn);
  const ring = await cohortRing(round.cohort), holders = ring.neighbors(place), { threshold } = ring.degrees;
  const at = holders.map((member) => member + 1), seeds = split(round.seed, at, threshold), keys = split(round.maskSecret, at, threshold);
  const sealed = new Map<number, Bytes>();
  for (const [number, member] of holders.entries()) {
    const common = await agree(round.shareSecret, members[member]!.shareKey);
    sealed.set(member, await seal(common, digest, place, member, join(seeds[number]!, keys[number]!)));
  }
  const commitment = await derived(round.seed, digest, "commitment", place);
  await store.put({ round, memory });
  return packed(SHARES, session.digest, join(commitment, packByMember(sealed)));
}

const cohortRing = ({ digest, members }: Cohort): Promise<Ring> => Ring.of(digest, [...members.keys()]);

// Refuse a cohort with a member that is not vouched for, or that is in it twice.
async function checkTrust(memory: Memory, session: Bytes, members: Advert[]): Promise<void> {
  for (const what of ["name", "enrolled", "signer", "maskKey", "shareKey"] as const)
    if (new Set(members.map((advert) => String(advert[what]))).size < members.length)
      throw refuse(`a cohort in which one ${what} comes twice`, "different devices");
  for (const advert of members) {
    const enrolled = hex(advert.enrolled), { name } = advert;
    if ((memory.seen.get(name) ?? enrolled) !== enrolled) throw refuse(`device ${name} with another key than before`, "the key that it had");
    const certified = hex(await sha256(join(advert.enrolled, advert.signer, advert.certificate)));
    if (!memory.checked.has(certified)) {
      let valid = false;
      try {
        const signed = join(utf8("fairfold signer"), advert.signer), key = await enrolledKey(advert.enrolled);
        valid = await crypto.subtle.verify({ name: "ECDSA", hash: "SHA-384" }, key, advert.certificate, signed);
      } catch {} // refused below
      if (!valid) throw refuse(`device ${name}, whose enrolled key did not sign`, "keys that are vouched for");
      memory.checked.add(certified);
    }
    if (!(await verified(advert.signer, advert.signature, advertSigned(session, advert.body))))
      throw refuse(`keys that device ${name} did not sign for this round`, "keys of this round, and not of another");
  }
  for (const { name, enrolled } of members) memory.seen.set(name, hex(enrolled));
}

// Refuse a set of members that is too small, or without this device.
function checkMembers(me: Identity, round: Round, members: Set<number>, size: number, did: string): void {
  const { sizes, place } = round.cohort!, { session } = round, least = minCohort(round, me);
  if (size !== sizes.length) throw refuse(`a cohort of ${size} devices all at once`, `the ${sizes.length} that it agreed to`);
  if (!members.has(place)) throw refuse(`a server that reports this device as dead, though it ${did}`, "what is true");
  if (members.size < quorum(size)) throw refuse(`${members.size} of ${size} devices left`, `at least ${quorum(size)}`);
  const left = owners(session, sizes, (member) => members.has(member));
  for (const [segment, those] of left)
    if (those.length < least) throw refuse(`${those.length} devices left in segment ${segment}`, `at least ${least}`);
  for (const [segment, those] of owners(session, sizes)) {
    const present = left.get(segment)?.length ?? 0, needed = Math.ceil((those.length * session.staying) / 100);
    if (present < needed) throw refuse(`${present} devices left in segment ${segment}`, `at least ${needed}, for which noise is sized`);
  }
}

// Check which members gave shares, and keep those for this device; an unreadable share is dropped alone.
async function receive(me: Identity, round: Round, message: Bytes): Promise<void> {
  const { session } = round, { reader } = open(DELIVERY, message, session.digest), { members: sharing, cohort: size } = reader.members();
  const sealed = reader.byMember(SEALED);
  reader.end();
  requireStep(round, "shared", "a second delivery of shares");
  checkMembers(me, round, sharing, size, "gave shares");
  const { digest, members, place } = round.cohort!, ring = await cohortRing(round.cohort!), { threshold } = ring.degrees;
  const holders = ring.neighbors(place), expected = holders.filter((member) => sharing.has(member));
  if (sealed.size !== expected.length || !expected.every((member) => sealed.has(member)))
    throw refuse("shares withheld, or of others than neighbors", "those of all neighbors who gave them");
  if (expected.length < threshold) throw refuse(`${expected.length} of ${holders.length} neighbors left`, `at least ${threshold}`);
  for (const [member, box] of sealed) {
    const common = await agree(round.shareSecret, members[member]!.shareKey), content = await unseal(common, digest, member, place, box);
    if (content) round.received.set(member, content);
  }
  if (round.received.size < threshold)
    throw refuse(`${round.received.size} shares that decrypt, of ${expected.length}`, `at least ${threshold}`);
  round.sharing = sharing;
  round.step = "received";
}

async function mask(round: Round, vector: Uint32Array<ArrayBuffer>): Promise<Bytes> {
  requireStep(round, "received", "a vector");
  const { session } = round, { digest, members, sizes, place } = round.cohort!, size = sizes[place]!;
  if (vector.length !== vectorLength(session, size))
    throw refuse(`a vector of ${vector.length} numbers`, `${vectorLength(session, size)}, those of its size`);
  round.step = "masked";
  const key = await secretKey(round.maskSecret), common = new Map<number, Bytes>(), all = owners(session, sizes);
  let start = 0;
  for (const segment of session.sizes[size]!) {
    const part = vector.subarray(start, (start += session.lengths[segment]!));
    addMask(part, await derived(round.seed, digest, "own", segment), 1);
    for (const other of (await Ring.of(digest, all.get(segment)!)).neighbors(place)) {
      if (!round.sharing.has(other)) continue;
      if (!common.has(other)) common.set(other, await agree(key, members[other]!.maskKey));
      const pair = await derived(common.get(other)!, digest, "pair", segment, Math.min(place, other), Math.max(place, other));
      addMask(part, pair, place < other ? 1 : -1);
    }
  }
  return packed(MASKED, session.digest, bytesOf(vector));
}

// Check whose vectors are in the sum, and sign that set.
async function sign(me: Identity, round: Round, message: Bytes): Promise<Bytes> {
  const { session } = round, { reader } = open(SURVIVORS, message, session.digest), { members: staying, cohort: size } = reader.members();
  reader.end();
  if (round.survivors && String([...round.survivors]) !== String([...staying]))
    throw refuse("a second set of survivors, to have both shares of a device", "one set per round");
  requireStep(round, "masked", "survivors");
  checkMembers(me, round, staying, size, "gave its vector");
  if ([...staying].some((member) => !round.sharing.has(member))) throw refuse("survivors who gave no shares", "some of those who did");
  const { digest, members, sizes } = round.cohort!;
  for (const those of owners(session, sizes).values()) {
    const alone = (await Ring.of(digest, those)).isolated(staying);
    if (alone !== null) throw refuse(`survivors that leave device ${members[alone]!.name} alone`, "enough neighbors of everybody");
  }
  round.survivors = staying;
  round.step = "signed";
  const signature = await crypto.subtle.sign("Ed25519", me.signer.privateKey, survivorsSigned(round));
  return packed(SIGNED, session.digest, new Uint8Array(signature));
}

function survivorsSigned({ cohort, sharing, survivors }: Round): Bytes {
  const size = cohort!.members.length;
  return join(utf8("fairfold survivors"), cohort!.digest, packMembers(sharing, size), packMembers(survivors!, size));
}

// Reveal one share of every neighbor (of its seed, or of its key if it left), once enough have signed.
async function reveal(round: Round, message: Bytes): Promise<Bytes> {
  const { session } = round, { reader } = open(SIGNATURES, message, session.digest), signatures = reader.byMember(SIGNATURE);
  reader.end();
  requireStep(round, "signed", "a second request for shares");
  const staying = round.survivors!, { members } = round.cohort!, signed = survivorsSigned(round);
  let valid = 0;
  for (const [member, signature] of signatures) {
    if (member >= members.length) throw refuse("a signature of nobody", "those of members");
    if (staying.has(member) && (await verified(members[member]!.signer, signature, signed))) valid++;
  }
  if (valid < quorum(members.length)) throw refuse(`survivors that ${valid} devices have signed`, `at least ${quorum(members.length)}`);
  round.step = "revealed";
  const shares = new Map<number, Bytes>();
  for (const [member, both] of round.received)
    shares.set(member, staying.has(member) ? join(Uint8Array.of(SEED), both.subarray(0, SHARE_BYTES))
      : join(Uint8Array.of(MASK_KEY), both.subarray(SHARE_BYTES)));
  return packed(REVEALED, session.digest, packByMember(shares));
}

// -- fixed point (fairfold.privacy.fixed_point) ------------------------------------------------------------------------

const MAX_SUM = 2 ** 31 - 1, FRACTION_STEPS = 2 ** 14;
const STATISTICS_STEPS = 1, UPDATE_STEPS = 1 << 16; // in 1, as the algorithm declares them

export interface MaskedUpdate {
  sums: Vectors;
  weight: number;
  quality?: number;
  evaluated?: number;
}

// An update as integers modulo 2³²: a header, then the tensors in the order of their names.
export function encode({ sums, weight, quality = 0, evaluated = 0 }: MaskedUpdate, steps: number, clients: number): Uint32Array<ArrayBuffer> {
  const limit = Math.floor(MAX_SUM / clients), names = Object.keys(sums).sort();
  const encoded = new Uint32Array(6 + names.reduce((size, name) => size + sums[name]!.length, 0));
  [weight, quality, evaluated].forEach((number, place) => {
    const bounded = Math.min(number, FRACTION_STEPS), whole = Math.floor(bounded);
    encoded.set([whole, rounded((bounded - whole) * FRACTION_STEPS)], 2 * place);
  });
  let at = 6;
  for (const name of names)
    for (const number of sums[name] as Float32Array) {
      const whole = rounded(number * steps);
      if (!(Math.abs(whole) <= limit))
        throw new Refusal("InvalidMessage", `${name} with a number of ${number} in a sum of ${clients} devices`, `${limit / steps} at most`,
          "Nothing was sent: a part of it would not be the sum. Ask fewer devices per round.");
      encoded[at++] = whole;
    }
  return encoded;
}

// How to reply to a request of the open round: the update is masked once.
export class SecureReply {
  private constructor(
    private readonly store: Store,
    private readonly round: Round,
  ) {}

  // Shares are checked before anything is computed; a sum of another purpose, round or run would be a second one.
  static open(store: Store, me: Identity, message: Bytes, [purpose, number, run]: [string, number, bigint | null], settings: any): Promise<SecureReply> {
    return inRound(store, message, async (round) => {
      const { session } = round;
      if (session.purpose !== purpose || session.round !== BigInt(number) || (run !== null && run !== session.run))
        throw refuse(`a sum for ${session.purpose} ${session.round} with the request ${purpose} ${number}`, "the sum of the request");
      if (session.minCohort < settings.privacy.min_cohort)
        throw refuse(`a sum over ${session.minCohort} devices where settings have ${settings.privacy.min_cohort}`, "the minimum of the settings");
      await receive(me, round, message);
      return new SecureReply(store, round);
    });
  }

  statistics = ({ sums, ...update }: MaskedUpdate): Promise<Reply> => {
    if (sums.users) (sums.users as Float64Array)[2] = 0; // the pairs of users are for plain runs
    return this.reply({ sums, ...update }, STATISTICS_STEPS);
  };
  train = (update: MaskedUpdate): Promise<Reply> => this.reply(update, UPDATE_STEPS);
  quality = (update: MaskedUpdate): Promise<Reply> => this.reply(update, UPDATE_STEPS);

  private async reply(update: MaskedUpdate, steps: number): Promise<Reply> {
    const { round, store } = this;
    const message = await mask(round, encode(update, steps, round.cohort!.members.length));
    await store.put({ round, served: "secure" }); // before it is sent: a server must not ask for the same in plain
    return [["secure", { secure: message }], ["fairfold", { version: PROTOCOL }]];
  }
}
