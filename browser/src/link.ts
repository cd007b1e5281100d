// The line to the server: enrolment, signed requests, and why a request was refused.

import { base64, hex, join, Refusal, sha256, unbase64, utf8, type Bytes } from "./bytes";
import { bigOf, enrolledPoint, P384 } from "./crypto";
import {
  allOf, bytesField, bytesIn, doubleField, numberField, numberIn, parseFields,
} from "./protobuf";
import type { Identity } from "./state";

export const HEARTBEAT_SECONDS = 30;
const MAX_POLL_SECONDS = 120, CLOCK_AHEAD = 5, CLOCK_BEHIND = 305, TIMEOUT = 60_000, MAX_RESPONSE = 1 << 24, MAX_ROSTER = 1 << 28;
const API = "/v1/fairfold/", FLEET = "/v1/fleet/";

// A request that the server did not accept. Those that pass by themselves are tried again.
export class Refused extends Error {
  constructor(
    readonly kind: "unreachable" | "busy" | "early" | "lost" | "clock" | "unregistered" | "refused",
    message: string,
  ) {
    super(message);
  }

  get passes(): boolean {
    return !["clock", "unregistered", "refused"].includes(this.kind);
  }
}

export interface Fleet {
  operator: string;
  items: number;
  catalogue: boolean;
  sample: boolean;
  authority: string;
  privacy: string; // level of its runs, "" where each run decides
}

async function request(path: string, options: RequestInit = {}): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(path, { ...options, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT) });
  } catch {
    throw new Refused("unreachable", "The server cannot be reached. It is tried again.");
  }
  if (response.ok) return response;
  const reason = (await response.text().catch(() => "")).slice(0, 500);
  let detail = reason.replace(/[^\x20-\x7e]/g, " ");
  try {
    detail = String(JSON.parse(reason).detail ?? reason).replace(/[^ -~\u00a0-\uffff]/g, " ");
  } catch {} // no JSON
  throw refusal(response.status, response.headers.get("date"), detail);
}

// A response of bounded length.
async function whole(response: Response, most = MAX_RESPONSE): Promise<Bytes> {
  const pieces: Bytes[] = [], reader = response.body!.getReader();
  for (let size = 0; ; ) {
    const { done, value } = await reader.read().catch(() => {
      throw new Refused("unreachable", "The server's response broke off. It is tried again.");
    });
    if (done) return join(...pieces);
    pieces.push(value);
    size += value.length;
    if (size > most) throw new Refused("refused", "The server sends more than it should.");
  }
}

function refusal(status: number, date: string | null, detail: string): Refused {
  if (status === 401) {
    const ahead = date ? (Date.now() - Date.parse(date)) / 1000 : 0;
    if (!(ahead > 1 - CLOCK_BEHIND && ahead < CLOCK_AHEAD - 1)) {
      const difference = `${Math.abs(ahead).toFixed(0)} s ${ahead > 0 ? "ahead of" : "behind"} the server's`;
      return new Refused("clock", `This device's clock is ${difference}. Set it, and reload the page.`);
    }
    return new Refused("lost", "The server does not know this device's connection any more.");
  }
  if (status === 403) return new Refused("unregistered", `The server does not accept this device: ${detail}.`);
  if (status === 409) return new Refused("early", `Too early: ${detail}. It ends within a minute.`);
  if ([408, 429, 502, 503, 504].includes(status)) return new Refused("busy", `The server is busy (status ${status}): ${detail}`);
  return new Refused("refused", `The server refuses (status ${status}): ${detail}`);
}

export const describe = async (): Promise<Fleet> => (await request(API + "fleet")).json();
export const fetchText = async (name: "catalogue" | "sample"): Promise<string> => (await request(API + name)).text();

// The server's signed log of enrolled keys from a byte on.
export const fetchRoster = async (start: number): Promise<Bytes> => whole(await request(`${API}roster?from=${start}`), MAX_ROSTER);

const TOKEN_BYTES = 16 + 32;

// An invitation as it was printed; its check bytes detect typing errors.
export async function parseToken(token: string): Promise<{ secret: Bytes; authority: Bytes }> {
  let content = new Uint8Array(0);
  try {
    content = unbase64(token.trim().slice(4).replace(/-/g, "+").replace(/_/g, "/"));
  } catch {} // refused below
  const body = content.slice(0, TOKEN_BYTES), check = (await sha256(body)).subarray(0, 3);
  if (!token.trim().startsWith("ff1-") || content.length !== TOKEN_BYTES + 3 || hex(check) !== hex(content.subarray(TOKEN_BYTES)))
    throw new Refusal("InvalidSettings", "an invitation that is cut off or has a typing error", "one as `fairfold server invite` prints it",
      "Copy the link as a whole.");
  return { secret: body.subarray(0, 16), authority: body.subarray(16) };
}

export type Keys = Pick<Identity, "key" | "signer" | "certificate" | "pem" | "id">;

// Keys that cannot be exported; they are stored before they are registered, so that nothing is lost in between.
export async function makeKeys(): Promise<Keys> {
  const { subtle } = crypto, key = await subtle.generateKey(P384, false, ["sign", "verify"]);
  const signer = (await subtle.generateKey("Ed25519", false, ["sign", "verify"])) as CryptoKeyPair;
  const certified = join(utf8("fairfold signer"), new Uint8Array(await subtle.exportKey("raw", signer.publicKey)));
  const certificate = new Uint8Array(await subtle.sign({ name: "ECDSA", hash: "SHA-384" }, key.privateKey, certified));
  const spki = base64(new Uint8Array(await subtle.exportKey("spki", key.publicKey)));
  const pem = `-----BEGIN PUBLIC KEY-----\n${spki.match(/.{1,64}/g)!.join("\n")}\n-----END PUBLIC KEY-----\n`;
  return { key, signer, certificate, pem, id: await deviceName(await enrolledPoint(key.publicKey)) };
}

// Register a key; the token's secret goes to a server with the token's authority alone.
export async function enrol(token: string, key: string): Promise<Pick<Identity, "items" | "users" | "modelSigner">> {
  const { secret, authority } = await parseToken(token), pem = await (await request(API + "authority")).text();
  if (hex(await sha256(unbase64(pem.replace(/-----[^-]+-----|\s/g, "")))) !== hex(authority))
    throw new Refusal("InvalidState", "a server that did not issue this invitation", "the one that did", "Nothing was sent to it.");
  const body = JSON.stringify({ secret: hex(secret), key, time: Date.now() / 1000 });
  const { items, users, signer } = await (await request(API + "enrol", { method: "POST", body })).json();
  return { items, users, modelSigner: signer };
}

// The name of the device with an enrolled key, in hexadecimal digits: from 1 to 2⁶³ − 1.
export async function deviceName(point: Bytes): Promise<string> {
  const digest = await sha256(join(utf8("fairfold device"), point));
  return (1n + (bigOf(digest.subarray(0, 8)) % (2n ** 63n - 1n))).toString(16);
}

// A signature of WebCrypto, r ‖ s, in the form that Flower wants: ASN.1.
export function derSignature(raw: Uint8Array): Bytes {
  const number = (part: Uint8Array): Bytes => {
    let start = 0;
    while (start < part.length - 1 && !part[start]) start++;
    const digits = part.subarray(start), padded = digits[0]! & 128 ? join(Uint8Array.of(0), digits) : digits;
    return join(Uint8Array.of(2, padded.length), padded);
  };
  const half = raw.length / 2, body = join(number(raw.subarray(0, half)), number(raw.subarray(half)));
  return join(Uint8Array.of(48, body.length), body);
}

export async function signedHeaders(privateKey: CryptoKey, pem: string, now: string): Promise<Record<string, string>> {
  const signature = await crypto.subtle.sign({ name: "ECDSA", hash: "SHA-256" }, privateKey, utf8(now));
  return {
    "content-type": "application/protobuf", accept: "application/protobuf", "flwr-timestamp": now,
    "flwr-public-key": btoa(pem), "flwr-signature": base64(derSignature(new Uint8Array(signature))),
  };
}

export type Call = (name: string, body: Bytes) => Promise<Bytes>;

// Flower's fleet API for an enrolled device, which signs every request with its key.
export class Connection {
  pollInterval = 0; // seconds between two polls that the server asks for
  received = 0;
  sent = 0;

  constructor(private readonly me: Identity) {}

  get heartbeatInterval(): number {
    return Math.max(HEARTBEAT_SECONDS, 2.5 * this.pollInterval);
  }

  async activate(): Promise<bigint> {
    const body = join(bytesField(1, utf8(this.me.pem)), doubleField(2, this.heartbeatInterval));
    return numberIn(parseFields(await this.call("activate-node", body)), 1);
  }

  async deactivate(node: bigint): Promise<void> {
    await this.call("deactivate-node", numberField(1, node));
  }

  // False if the server no longer holds this device's connection.
  async heartbeat(node: bigint): Promise<boolean> {
    const body = join(bytesField(1, numberField(1, node)), doubleField(2, this.heartbeatInterval));
    return numberIn(parseFields(await this.call("send-node-heartbeat", body)), 1) === 1n;
  }

  // The next message with its objects' tree, or null.
  async pull(node: bigint): Promise<Bytes | null> {
    const response = await this.call("pull-messages", bytesField(1, numberField(1, node))), fields = parseFields(response);
    if (allOf(fields, 2).length) return response;
    this.pollInterval = Math.min(Number(numberIn(parseFields(bytesIn(fields, 1)), 1)), MAX_POLL_SECONDS);
    return null;
  }

  call: Call = async (name, body) => {
    const now = new Date().toISOString().replace("Z", "000+00:00");
    const headers = await signedHeaders(this.me.key.privateKey, this.me.pem, now);
    const response = await request(FLEET + name, { method: "POST", body, headers });
    const content = await whole(response);
    this.sent += body.length;
    this.received += content.length;
    return content;
  };
}

