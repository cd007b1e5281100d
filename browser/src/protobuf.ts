// The part of protobuf that messages need: fields of numbers and bytes, and records of configuration.

import { bytesOf, invalid, join, text, utf8, type Bytes } from "./bytes";

export type Field = bigint | Bytes;
export type Fields = Map<number, Field[]>;
const VARINT = 0, DOUBLE = 1, BYTES = 2, FLOAT = 5;
const DOUBLE_LIST = 21, BOOL_LIST = 24; // Flower writes an empty list as one of booleans
const NOTHING = new Uint8Array(0);

// A number that is written with a fraction, though it may have none.
export class Double {
  constructor(readonly value: number) {}
}
export type Fact = boolean | number | bigint | string | Double | number[] | Bytes;
export type Facts = Record<string, Fact>;

export function varint(number: bigint | number): Bytes {
  let rest = BigInt.asUintN(64, BigInt(number));
  const encoded: number[] = [];
  for (; rest > 127n; rest >>= 7n) encoded.push(Number(rest & 127n) | 128);
  return Uint8Array.from([...encoded, Number(rest)]);
}

const tag = (field: number, kind: number): Bytes => varint((field << 3) | kind);
const doubles = (...numbers: number[]): Bytes => bytesOf(Float64Array.from(numbers)); // typed arrays are little-endian on all that runs browsers

// Fields of a number and of a text are left out where they are 0 or empty, as protobuf writes them.
export const numberField = (field: number, number: bigint | number): Bytes =>
  BigInt(number) ? join(tag(field, VARINT), varint(number)) : NOTHING;
export const doubleField = (field: number, number: number): Bytes =>
  number ? join(tag(field, DOUBLE), doubles(number)) : NOTHING;
export const bytesField = (field: number, content: Uint8Array): Bytes =>
  join(tag(field, BYTES), varint(content.length), content);
export const textField = (field: number, words: string): Bytes => (words ? bytesField(field, utf8(words)) : NOTHING);
export const packedDoubles = (field: number, ...numbers: number[]): Bytes => bytesField(field, doubles(...numbers));

export function parseFields(content: Bytes): Fields {
  const found: Fields = new Map();
  let place = 0;
  const broken = () => invalid("bytes that are no message");
  const number = (): bigint => {
    for (let value = 0n, shift = 0n; ; shift += 7n) {
      const byte = content[place++];
      if (byte === undefined || shift > 63n) throw broken();
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return value;
    }
  };
  while (place < content.length) {
    const key = number(), kind = Number(key & 7n), field = Number(key >> 3n);
    let value: Field;
    if (kind === VARINT) value = number();
    else {
      const size = kind === BYTES ? Number(number()) : kind === DOUBLE ? 8 : kind === FLOAT ? 4 : Infinity;
      if (place + size > content.length) throw broken();
      value = content.subarray(place, place + size);
      place += size;
    }
    const known = found.get(field);
    if (known) known.push(value);
    else found.set(field, [value]);
  }
  return found;
}

export const allOf = (fields: Fields, field: number): Bytes[] =>
  (fields.get(field) ?? []).filter((value): value is Bytes => typeof value !== "bigint");
export const bytesIn = (fields: Fields, field: number): Bytes => allOf(fields, field)[0] ?? NOTHING;
export const textIn = (fields: Fields, field: number): string => text(bytesIn(fields, field));
export const numberIn = (fields: Fields, field: number): bigint => {
  const value = fields.get(field)?.[0];
  return typeof value === "bigint" ? value : 0n;
};
export const doubleIn = (fields: Fields, field: number): number => asDoubles(bytesIn(fields, field))[0] ?? 0;

const asDoubles = (content: Bytes): number[] => Array.from(new Float64Array(content.slice(0, content.length & ~7).buffer));

export function packConfig(facts: Facts): Bytes {
  const entries = Object.entries(facts).map(([key, value]) =>
    bytesField(1, join(bytesField(1, utf8(key)), bytesField(2, packValue(value)))));
  return join(...entries);
}

function packValue(value: Fact): Bytes {
  if (typeof value === "boolean") return join(tag(4, VARINT), varint(+value));
  if (typeof value === "number" || typeof value === "bigint") return join(tag(2, VARINT), varint((BigInt(value) << 1n) ^ (BigInt(value) >> 63n)));
  if (value instanceof Double) return join(tag(1, DOUBLE), doubles(value.value));
  if (typeof value === "string") return bytesField(5, utf8(value));
  if (value instanceof Uint8Array) return bytesField(6, value);
  return value.length ? bytesField(DOUBLE_LIST, packedDoubles(1, ...value)) : bytesField(BOOL_LIST, NOTHING);
}

export function parseConfig(content: Bytes): Facts {
  const facts: Facts = Object.create(null);
  for (const entry of allOf(parseFields(content), 1)) {
    const fields = parseFields(entry), value = parseFields(bytesIn(fields, 2)), kind = [...value.keys()][0] ?? 0;
    facts[textIn(fields, 1)] = parseValue(kind, value);
  }
  return facts;
}

function parseValue(kind: number, value: Fields): Fact {
  if (kind === 1) return new Double(doubleIn(value, 1));
  if (kind === 4) return numberIn(value, 4) === 1n;
  if (kind === 5) return textIn(value, 5);
  if (kind === 2) {
    const coded = numberIn(value, 2), number = (coded >> 1n) ^ -(coded & 1n);
    return BigInt(Number(number)) === number ? Number(number) : number;
  }
  if (kind === DOUBLE_LIST)
    return allOf(parseFields(bytesIn(value, kind)), 1).flatMap(asDoubles);
  const content = bytesIn(value, kind);
  return kind === BOOL_LIST && !content.length ? [] : content;
}
