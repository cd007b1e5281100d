// What a device keeps: parts by name, replaced together or not at all.

import { Refusal, type Bytes } from "./bytes";
import { markLost, NEW, type UserHistory } from "./uploads";

export interface Store {
  get<T>(part: string): Promise<T | undefined>;
  put(parts: Record<string, unknown>): Promise<void>;
}

export const LEVELS = ["plain", "secure", "private"];
export type Histories = Record<string, number[]>; // items of every user, ascending

// Part "device": who this device is, and what its owner allows.
export interface Identity {
  operator: string;
  id: string; // follows from its key, in hexadecimal digits
  key: CryptoKeyPair; // the private half cannot be exported
  signer: CryptoKeyPair; // signs messages of secure aggregation
  certificate: Uint8Array; // the key's signature of the signer
  pem: string;
  capacity: string;
  level: string; // the least privacy that it takes part in
  minCohort: number;
  items: number; // size of the catalogue
  users: number; // the most users that it may stand for
  modelSigner: string; // the public key with which the server signs models and its roster, in hexadecimal digits
}

// Part "data": its users' histories, in the catalogue's numbers; those held out are for measuring quality alone.
export interface Data {
  train: Histories;
  heldOut: Histories;
}

// Part "model": the newest that the server has sent.
export interface StoredModel {
  file: Bytes;
  number: string; // by which the server signed it, in hexadecimal digits; empty where it signs none
  round: number;
  at: number; // milliseconds since the epoch
}

export interface Remembered {
  id: string;
  users: Record<string, { items: number[]; states: number[]; defaultQuality: number }>;
}

// Part "state": the updates that the server has acknowledged, or may acknowledge with the next task.
export interface State {
  run: string;
  acknowledged: Remembered;
  pending: Remembered | null;
  numbering: string;
  numbers: Map<number, number>;
}

const NONE: Remembered = { id: "0", users: {} };
export const newState = (): State => ({ run: "0", acknowledged: NONE, pending: null, numbering: "0", numbers: new Map() });

// The state with the update that the server has acknowledged; refuses one that is no longer stored.
export function reconcile(state: State, run: string, acknowledged: string): State {
  const isSame = run === state.run;
  if (!isSame && acknowledged === "0") return { ...state, acknowledged: NONE, pending: null, run };
  if (isSame && state.pending?.id === acknowledged) return { ...state, acknowledged: state.pending, pending: null };
  if (isSame && acknowledged === state.acknowledged.id) return { ...state, pending: null };
  const missing = isSame ? "an update this device no longer has" : "a run this device does not know";
  throw new Refusal("InvalidState", `a task that builds on ${missing}`, "one of its last two updates in this run",
    "It takes part again in the next run.");
}

// The histories in the numbers of a run.
function renumbered(part: Histories, state: State): Histories {
  const number = (item: number): number => {
    const found = state.numbers.get(item);
    if (found !== undefined) return found;
    throw new Refusal("InvalidState", "items without their numbers in this run", "the server's numbering",
      "The server sends it again.");
  };
  return Object.fromEntries(Object.entries(part).map(([user, items]) => [user, items.map(number).sort((a, b) => a - b)]));
}

// The users' histories with the acknowledged sync states: what they have and had in this run.
export function openHistories(state: State, data: Data, numbering: string): Map<string, UserHistory> {
  let { train, heldOut } = data;
  if (numbering !== "0") {
    if (state.numbering !== numbering) state = { ...state, numbers: new Map() };
    [train, heldOut] = [renumbered(train, state), renumbered(heldOut, state)];
  }
  const users = new Map<string, UserHistory>();
  for (const name of new Set([...Object.keys(state.acknowledged.users), ...Object.keys(train).sort()])) {
    const before = state.acknowledged.users[name], current = new Set(train[name] ?? []);
    const known = new Map(before?.items.map((item, place) => [item, before.states[place]!]));
    const items = [...new Set([...known.keys(), ...current])].sort((a, b) => a - b);
    const user = {
      items, states: items.map((item) => known.get(item) ?? NEW),
      defaultQuality: before?.defaultQuality ?? 0, heldOut: heldOut[name] ?? [],
    };
    markLost(user, current);
    users.set(name, user);
  }
  return users;
}

export const remembered = (id: string, users: Map<string, UserHistory>): Remembered => ({
  id,
  users: Object.fromEntries([...users].map(([name, { items, states, defaultQuality }]) => [name, { items, states, defaultQuality }])),
});
