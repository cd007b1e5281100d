// What a device computes of its users' histories for the default algorithm: fairfold.device.uploads.

import { DeviceModel } from "./model";
import type { Vectors } from "./records";

const UNIT = 1 << 16; // fixed-point steps per 1 of a co-occurrence weight
const MAX_DENSE = 1 << 26; // numbers of a sum that is ever dense
// Sync states of an item of a history: 0 is new; else the sum of 2 to the power of each part of the sum that has it; with
// all bits inverted where the user no longer has it
export const NEW = 0;

// The number of a part of the pairs, and how many there are.
export type Part = [number, number];

// All items that a user has or had in this run, ascending, with the sync state of each.
export interface UserHistory {
  items: number[];
  states: number[];
  defaultQuality: number; // 1 + the quality of the first candidate, 0 if not measured
  heldOut: number[]; // for evaluation alone
}

const sum = (numbers: Iterable<number>): number => {
  let total = 0;
  for (const number of numbers) total += number;
  return total;
};

// A hash of an integer to 32 bits.
export function scatter(value: bigint): number {
  let found = value & 0xffffffffn;
  for (let turn = 0; turn < 2; turn++) found = (((found >> 16n) ^ found) * 0x45d9f3bn) & 0xffffffffn;
  return Number((found >> 16n) ^ found);
}

// Halves to even, as Python rounds.
export function rounded(number: number): number {
  const whole = Math.floor(number), rest = number - whole;
  return rest > 0.5 || (rest === 0.5 && whole % 2) ? whole + 1 : whole;
}


// Elements in the columns part, part + parts, … of the packed triangle over some items.
export function partSize(items: number, [part, parts]: Part = [0, 1]): number {
  const columns = Math.ceil((items - part) / parts);
  return columns * (part + 1) + (parts * columns * (columns - 1)) / 2;
}

export function triangleItems(size: number): number {
  let items = Math.floor((Math.sqrt(8 * size + 1) - 1) / 2);
  while (partSize(items) > size) items--;
  while (partSize(items + 1) <= size) items++;
  return items;
}

// Sync states by the items that the user still has.
export function markLost(user: UserHistory, current: Set<number>): void {
  user.items.forEach((item, place) => {
    const state = user.states[place]!;
    if (current.has(item) === state < NEW) user.states[place] = ~state;
  });
}

// The tenth of a history that is not uploaded while candidates are tried; none of a single item.
export function heldOutItems(items: number[]): Set<number> {
  if (items.length < 2) return new Set();
  const count = Math.max(1, rounded(Math.fround(items.length * Math.fround(0.1))));
  const total = BigInt(scatter(BigInt(sum(items))));
  const chance = new Map(items.map((item) => [item, scatter(BigInt(item) * 2654435761n + total)]));
  return new Set([...items].sort((one, other) => chance.get(one)! - chance.get(other)!).slice(0, count));
}

// Weight of a pair in a history of some length: n to the −exponent, as a multiple of the unit.
export const pairWeight = (length: number, exponent: number): number =>
  Math.max(1, Math.floor(UNIT / Math.max(1, length) ** exponent)) / UNIT;

// The change of the users' co-occurrences, whose sync states are brought up to date; without `most`, as secure
// aggregation needs it, dense and of all items.
export function upload(
  users: Iterable<UserHistory>, given: { head: number; leading: number; share: number; most?: number; exponent: number; part?: Part | undefined },
): Vectors {
  const { head, share, most, exponent, part = [0, 1] } = given, bit = 1 << part[0], added: [number[], number][] = [], retracted: [number[], number][] = [];
  const has = (state: number) => (state < NEW ? ~state : state) & bit;
  const there = (user: UserHistory) => user.items.filter((item, place) => has(user.states[place]!) && item < head);
  for (const user of users) {
    const heldOut = share < 1 ? heldOutItems(user.items) : new Set(), before = there(user);
    user.items.forEach((item, place) => {
      const state = user.states[place]!;
      if (state !== NEW || !heldOut.has(item)) user.states[place] = state | bit; // cleared, where bits are inverted
    });
    const now = there(user);
    if (now.length === before.length && now.every((item, place) => item === before[place])) continue;
    added.push([now.slice(0, most), pairWeight(now.length, exponent)]);
    retracted.push([before.slice(0, most), -pairWeight(before.length, exponent)]);
  }
  return packPairs([...added, ...retracted], given.leading, most === undefined, part);
}

// The packed sum of pairs of weighted histories over the leading items, or a part of it: dense, or where that takes fewer bytes the
// nonzero values with their positions.
export function packPairs(histories: [number[], number][], leading: number, dense = false, part: Part = [0, 1]): Vectors {
  const cut = histories.map(([items, weight]): [number[], number] => [items.filter((item) => item < leading), weight]);
  const size = partSize(leading), pairs = sum(cut.map(([items]) => partSize(items.length)));
  const isDense = dense || (2 * pairs >= size && size <= MAX_DENSE);
  const each = (add: (place: number, weight: number) => void): void => {
    for (const [items, weight] of cut)
      items.forEach((column, count) => {
        if (column % part[1] !== part[0]) return;
        for (let other = 0; other <= count; other++) add(partSize(column, part) + items[other]!, weight);
      });
  };
  if (isDense) {
    const total = new Float32Array(partSize(leading, part));
    each((place, weight) => (total[place]! += weight)); // exact: multiples of the unit below 256
    return { sum: total };
  }
  let many = 0;
  const all = new Float64Array(pairs);
  each((place) => (all[many++] = place));
  const places = all.sort().filter((place, at) => place !== all[at - 1]), sums = new Float64Array(places.length);
  each((place, weight) => (sums[search(places, place)]! += weight));
  return { "sum.indices": size > 2 ** 31 ? BigInt64Array.from(Array.from(places, BigInt)) : Int32Array.from(places), sum: Float32Array.from(sums) };
}

// Where a number is in an ascending list that has it.
function search(places: Float64Array, wanted: number): number {
  let low = 0, high = places.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (places[middle]! < wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The sum of the users' reports on a candidate; the default's quality is remembered in their histories.
export async function report(
  users: Iterable<UserHistory>, model: DeviceModel,
  given: { isDefault: boolean; share: number; catalogue: number; top: number; tick: () => Promise<void> },
): Promise<Vectors> {
  const { isDefault, share, catalogue, top, tick } = given, reporting: [UserHistory, number[], number[]][] = [];
  for (const user of users) {
    const known = user.items.filter((_, place) => user.states[place]! > NEW);
    const heldOut = user.items.filter((_, place) => user.states[place] === NEW), length = known.length + heldOut.length;
    const chance = scatter(BigInt((sum(known) + sum(heldOut)) * 7 + length));
    if (known.length && heldOut.length && chance < share * 2 ** 32 && (isDefault || user.defaultQuality > 0))
      reporting.push([user, known, heldOut]);
  }
  const longest = Math.max(0, ...reporting.map(([, known]) => known.length)), total = [0, 0, 0, 0];
  for (const [user, known, heldOut] of reporting) {
    await tick();
    const quality = model.ndcg(known, heldOut, catalogue, top, longest);
    const better = isDefault ? 0 : quality - (user.defaultQuality - 1);
    if (isDefault) user.defaultQuality = Math.fround(1 + Math.fround(quality));
    [1, quality, better, better ** 2].forEach((number, place) => (total[place]! += rounded(number * UNIT)));
  }
  return { quality: Float32Array.from(total, (number) => number / UNIT) };
}
