// The browser device in node, for the scripts beside this one, whose first two arguments are its built file and the folder of vectors.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const [, , built, folder] = process.argv;
createRequire(import.meta.url)(built);
export const device = globalThis.fairfold;
export const { base64 } = device;
const { unhex, unbase64 } = device;
export const read = (name) => JSON.parse(readFileSync(`${folder}/${name}.json`, "utf8"));

export class Memory {
  parts = new Map();
  async get(part) {
    return structuredClone(this.parts.get(part));
  }
  async put(changed) {
    for (const [part, value] of Object.entries(changed)) value === null ? this.parts.delete(part) : this.parts.set(part, structuredClone(value));
  }
}

export const objectsOf = (named) => new Map(Object.entries(named).map(([id, content]) => [id, unbase64(content)]));
export const big = (digits) => BigInt("0x" + digits);

// Part "device" of a recorded one.
export async function ownerOf({ capacity, name: id, identity, min_cohort }) {
  const { subtle } = crypto, me = { id, capacity, level: identity ? "secure" : "plain", minCohort: min_cohort ?? 100 };
  if (!identity) return me;
  const pkcs8 = unbase64(identity.key_pkcs8), point = pkcs8.slice(-97), algorithm = { name: "ECDSA", namedCurve: "P-384" };
  const seed = device.join(unhex("302e020100300506032b657004220420"), unhex(identity.signer));
  const privateKey = await subtle.importKey("pkcs8", seed, "Ed25519", true, ["sign"]), { x } = await subtle.exportKey("jwk", privateKey);
  return {
    ...me,
    key: { privateKey: await subtle.importKey("pkcs8", pkcs8, algorithm, false, ["sign"]), publicKey: await subtle.importKey("raw", point, algorithm, true, ["verify"]) },
    signer: { privateKey, publicKey: await subtle.importKey("jwk", { kty: "OKP", crv: "Ed25519", x }, "Ed25519", true, ["verify"]) },
    certificate: unhex(identity.certificate),
  };
}

// The draws of a recorded step.
export function drawAs(draws) {
  const bytes = draws?.mask_secret && [draws.mask_secret, draws.share_secret, draws.seed, draws.nonce].map(unhex);
  const numbers = draws?.seed_factors && [...draws.seed_factors, ...draws.mask_secret_factors].map(big);
  device.source.bytes = (size) => bytes?.shift() ?? new Uint8Array(size);
  device.source.below = () => numbers?.shift() ?? 1n;
}

// A step's file, held out as the device's owner says.
export async function giveFile(store, { file }, holdout) {
  if (!file) return;
  const rows = device.parseCsv(file).map(({ user, item }) => [user, Number(item), item]);
  await store.put({ data: await device.histories(rows, holdout) });
}
