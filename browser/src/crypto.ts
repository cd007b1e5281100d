// Keys of secure aggregation: agreement, derivation, masks, sealed boxes, sharing, signatures.

import { hex, join, Refusal, sha256, unhex, utf8, type Bytes } from "./bytes";

const { subtle } = crypto;
export const source = { // tests give it fixed numbers
  bytes: (size: number): Bytes => crypto.getRandomValues(new Uint8Array(size)),
  below: (end: bigint): bigint => {
    for (;;) {
      const drawn = bigOf(source.bytes(40)) >> 63n; // 257 bits: at least every second number is below 2²⁵⁶ + 297
      if (drawn < end) return drawn;
    }
  },
};

export const bigOf = (bytes: Uint8Array): bigint => BigInt("0x" + hex(bytes));
export const bigBytes = (number: bigint, size: number): Bytes => unhex(number.toString(16).padStart(2 * size, "0"));
export const uint = (number: number | bigint, size: number): Bytes => bigBytes(BigInt(number), size);

export const refuse = (given: string, needed: string): Refusal =>
  new Refusal("RequestRefused", given, needed, "This device takes no part; ask the operator of the server.");

// -- agreement and derived keys --------------------------------------------------------------------------------------

const X25519_HEAD = unhex("302e020100300506032b656e04220420"); // PKCS #8, before the 32 bytes of a secret key

export const secretKey = (secret: Bytes, extractable = false): Promise<CryptoKey> =>
  subtle.importKey("pkcs8", join(X25519_HEAD, secret), "X25519", extractable, ["deriveBits"]);

export async function publicOf(secret: Bytes): Promise<Bytes> {
  const { x } = await subtle.exportKey("jwk", await secretKey(secret, true));
  return Uint8Array.from(atob(x!.replace(/-/g, "+").replace(/_/g, "/")), (letter) => letter.charCodeAt(0));
}

// The secret shared with the owner of a public key.
export async function agree(key: CryptoKey, other: Bytes): Promise<Bytes> {
  try {
    const theirs = await subtle.importKey("raw", other, "X25519", false, []);
    const common = new Uint8Array(await subtle.deriveBits({ name: "X25519", public: theirs }, key, 256));
    if (common.some(Boolean)) return common;
  } catch {} // a low-order point: the shared secret would be known to anyone
  throw refuse("a key that leads to no secret", "a public key of X25519");
}

// A key for one purpose of one cohort.
export async function derived(secret: Bytes, digest: Bytes, purpose: string, ...facts: number[]): Promise<Bytes> {
  const key = await subtle.importKey("raw", secret, "HKDF", false, ["deriveBits"]);
  const info = join(utf8("fairfold " + purpose), ...facts.map((fact) => uint(fact, 4)));
  return new Uint8Array(await subtle.deriveBits({ name: "HKDF", hash: "SHA-256", salt: digest, info }, key, 256));
}

async function box(common: Bytes, cohort: Bytes, sender: number, receiver: number): Promise<[AesGcmParams, CryptoKey]> {
  const raw = await derived(common, cohort, "share", sender, receiver);
  // The key serves once, so the nonce may be fixed.
  return [{ name: "AES-GCM", iv: new Uint8Array(12), additionalData: cohort },
    await subtle.importKey("raw", raw, "AES-GCM", false, ["encrypt", "decrypt"])];
}

export async function seal(common: Bytes, cohort: Bytes, sender: number, receiver: number, content: Bytes): Promise<Bytes> {
  return new Uint8Array(await subtle.encrypt(...(await box(common, cohort, sender, receiver)), content));
}

// What `seal` encrypted; null if it is not what the sender sealed for this cohort.
export async function unseal(common: Bytes, cohort: Bytes, sender: number, receiver: number, sealed: Bytes): Promise<Bytes | null> {
  try {
    return new Uint8Array(await subtle.decrypt(...(await box(common, cohort, sender, receiver)), sealed));
  } catch {
    return null;
  }
}

// -- masks -----------------------------------------------------------------------------------------------------------

// Add the stream of ChaCha20 (counter and nonce 0) to a vector, or subtract it, modulo 2³².
export function addMask(vector: Uint32Array, key: Bytes, sign: 1 | -1): void {
  const start = new Uint32Array(16), x = new Uint32Array(16);
  start.set([0x61707865, 0x3320646e, 0x79622d32, 0x6b206574]);
  start.set(new Uint32Array(key.slice().buffer), 4);
  const quarter = (a: number, b: number, c: number, d: number): void => {
    let t: number;
    x[a] = x[a]! + x[b]!; t = x[d]! ^ x[a]!; x[d] = (t << 16) | (t >>> 16);
    x[c] = x[c]! + x[d]!; t = x[b]! ^ x[c]!; x[b] = (t << 12) | (t >>> 20);
    x[a] = x[a]! + x[b]!; t = x[d]! ^ x[a]!; x[d] = (t << 8) | (t >>> 24);
    x[c] = x[c]! + x[d]!; t = x[b]! ^ x[c]!; x[b] = (t << 7) | (t >>> 25);
  };
  for (let at = 0; at < vector.length; at += 16) {
    x.set(start);
    for (let round = 0; round < 10; round++) {
      quarter(0, 4, 8, 12); quarter(1, 5, 9, 13); quarter(2, 6, 10, 14); quarter(3, 7, 11, 15);
      quarter(0, 5, 10, 15); quarter(1, 6, 11, 12); quarter(2, 7, 8, 13); quarter(3, 4, 9, 14);
    }
    for (let word = 0; word < 16 && at + word < vector.length; word++)
      vector[at + word] = vector[at + word]! + sign * ((x[word]! + start[word]!) >>> 0);
    if (!++start[12]!) start[13]!++;
  }
}

// -- Shamir's sharing, modulo the smallest prime above 2²⁵⁶ -------------------------------------------------------------

export const PRIME = 2n ** 256n + 297n, SHARE_BYTES = 33;

export function split(secret: Bytes, places: number[], threshold: number): Bytes[] {
  const factors = [bigOf(secret), ...Array.from({ length: threshold - 1 }, () => source.below(PRIME))];
  return places.map((place) =>
    bigBytes(factors.reduceRight((value, factor) => (value * BigInt(place) + factor) % PRIME, 0n), SHARE_BYTES));
}

// -- signatures ------------------------------------------------------------------------------------------------------

export async function verified(signer: Bytes, signature: Bytes, signed: Bytes): Promise<boolean> {
  try {
    return await subtle.verify("Ed25519", await subtle.importKey("raw", signer, "Ed25519", false, ["verify"]), signature, signed);
  } catch {
    return false;
  }
}

const P = 2n ** 384n - 2n ** 128n - 2n ** 96n + 2n ** 32n - 1n;
const B = BigInt("0xb3312fa7e23ee7e4988e056be3f82d19181d9c6efe8141120314088f5013875ac656398d8a2ed19d2a85c8edd3ec2aef");
export const P384 = { name: "ECDSA", namedCurve: "P-384" };

// A key of P-384 from its compressed point: WebCrypto takes whole ones alone.
export async function enrolledKey(point: Bytes): Promise<CryptoKey> {
  const x = bigOf(point.subarray(1)), square = (x * x * x - 3n * x + B) % P;
  let y = power(square, (P + 1n) / 4n);
  if (x >= P || point[0]! >> 1 !== 1 || (y * y - square) % P) throw new Error("no point of P-384");
  if (Number(y & 1n) !== (point[0]! & 1)) y = P - y;
  return subtle.importKey("raw", join(Uint8Array.of(4), point.subarray(1), bigBytes(y, 48)), P384, false, ["verify"]);
}

function power(base: bigint, exponent: bigint): bigint {
  let found = 1n;
  for (; exponent; exponent >>= 1n, base = (base * base) % P) if (exponent & 1n) found = (found * base) % P;
  return found;
}

export async function enrolledPoint(key: CryptoKey): Promise<Bytes> {
  const point = new Uint8Array(await subtle.exportKey("raw", key));
  return join(Uint8Array.of(2 + (point[96]! & 1)), point.subarray(1, 49));
}

// -- the graph of who is masked with whom ----------------------------------------------------------------------------

const LEAVING = 0.3, COLLUDING = 0.1, UNSAFE = 1e-6, UNFINISHED = 1e-3, MIN_DEGREE = 40;

export interface Degrees {
  degree: number;
  threshold: number;
  staying: number;
}

// Signatures that a set of survivors needs: no two sets can have them, even if colluders sign both.
export const quorum = (cohort: number): number => Math.floor((cohort + Math.floor(COLLUDING * cohort)) / 2) + 1;

function comb(all: number, drawn: number): bigint {
  if (drawn > all) return 0n;
  let found = 1n;
  for (let at = 1; at <= drawn; at++) found = (found * BigInt(all - drawn + at)) / BigInt(at);
  return found;
}

// The probability that at most 0, 1, … of those drawn are marked.
function atMost(others: number, marked: number, drawn: number): number[] {
  const whole = comb(others, drawn);
  let ways = 0n;
  return Array.from({ length: drawn + 1 }, (_, found) => {
    ways += comb(marked, found) * comb(others - marked, drawn - found);
    return Number((ways << 200n) / whole) / 2 ** 200;
  });
}

const chosen = new Map<number, Degrees>();
export function degrees(cohort: number): Degrees {
  const known = chosen.get(cohort) ?? chooseDegrees(cohort);
  chosen.set(cohort, known);
  return known;
}

function chooseDegrees(cohort: number): Degrees {
  const others = cohort - 1, complete = { degree: others, threshold: Math.floor(others / 2) + 1, staying: 0 };
  const colluding = Math.floor(COLLUDING * cohort), remaining = others - Math.floor(LEAVING * cohort);
  for (let degree = MIN_DEGREE; others > MIN_DEGREE && degree < others; degree += 2) {
    const around = atMost(others, remaining, degree), side = atMost(others, remaining, degree / 2);
    let threshold = 0, staying = 1;
    for (let few = 2; few < degree; few++) if (cohort * around[few - 1]! <= UNFINISHED) threshold = few;
    if (!threshold || cohort * (1 - atMost(others, colluding, degree)[threshold - 1]!) > UNSAFE) continue;
    for (let few = 1; few < degree / 2; few++) if (cohort * side[few - 1]! <= UNFINISHED) staying = few;
    return { degree, threshold, staying };
  }
  return complete;
}

// Members of a cohort in a ring, by an order that nobody chooses alone.
export class Ring {
  private constructor(
    readonly order: number[],
    readonly degrees: Degrees,
  ) {}

  static async of(digest: Bytes, members: number[]): Promise<Ring> {
    const seed = await sha256(join(utf8("fairfold ring"), digest, ...members.map((member) => uint(member, 4))));
    const keyed = await Promise.all(members.map(async (member) => [hex(await sha256(join(seed, uint(member, 4)))), member] as const));
    keyed.sort(([one], [other]) => (one < other ? -1 : 1));
    return new Ring(keyed.map(([, member]) => member), degrees(members.length));
  }

  private get isComplete(): boolean {
    return this.degrees.degree >= this.order.length - 1;
  }

  neighbors(member: number): number[] {
    const { order } = this, half = this.degrees.degree / 2, place = order.indexOf(member);
    const near = this.isComplete ? order.filter((other) => other !== member)
      : order.filter((_, at) => at !== place && Math.min((at - place + order.length) % order.length, (place - at + order.length) % order.length) <= half);
    return near.sort((one, other) => one - other);
  }

  // A survivor with too few other survivors before or behind it; null if there is none.
  isolated(survivors: Set<number>): number | null {
    if (this.isComplete) return null;
    const { order } = this, half = this.degrees.degree / 2, length = order.length;
    for (const [place, member] of order.entries()) {
      const count = (way: number): number => {
        let found = 0;
        for (let step = 1; step <= half; step++) found += +survivors.has(order[(place + way * step + length) % length]!);
        return found;
      };
      if (survivors.has(member) && Math.min(count(1), count(-1)) < this.degrees.staying) return member;
    }
    return null;
  }
}

