// The server's signed log of enrolled keys (fairfold.privacy.secure.log). All devices of a sum are shown the same one: adverts
// are bound to its head. A device follows it as it grows, and accepts members that stand in it alone.

import { hex, sha256, text, unhex, utf8, type Bytes } from "./bytes";
import { refuse, verified } from "./crypto";
import type { Store } from "./state";

export interface LogHead {
  lines: number;
  hash: string; // of the last line, in hexadecimal digits
}
export const NO_LOG = "0".repeat(64); // the hash before the first line
export type FetchLog = (start: number) => Promise<Bytes>;

// Part "roster": what invitations have named of it.
interface LogCopy extends LogHead {
  bytes: number;
  keys: Set<string>; // compressed points, in hexadecimal digits
}

const LINE = /^\{"key": "([0-9a-f]{98})", "node": "(0|[1-9a-f][0-9a-f]{0,15})", "users": ([1-9]\d{0,5}|1000000), "previous": "([0-9a-f]{64})", "signature": "([0-9a-f]{128})"\}$/;

// Fetch the lines that an invitation names beyond those that are known; refuse what contradicts them, or lacks this device.
export async function follow(store: Store, named: LogHead, signer: string, own: Bytes, fetchLog: FetchLog): Promise<void> {
  const known = (await store.get<LogCopy>("roster")) ?? { lines: 0, hash: NO_LOG, bytes: 0, keys: new Set<string>() };
  if (!named.lines) throw refuse("an invitation without the roster", "the roster of the server that this device enrolled with");
  if (named.lines < known.lines)
    throw refuse(`an invitation by a roster of ${named.lines} lines, after one of ${known.lines}`, "a log that only grows");
  if (named.lines > known.lines) {
    const content = text(await fetchLog(known.bytes).catch((error) => {
      throw refuse(error.message, "a server that shows its roster");
    }));
    for (const line of content.split("\n").slice(0, -1).slice(0, named.lines - known.lines)) {
      const [, key, node, users, previous, signature] = LINE.exec(line) ?? [], wrong = (why: string) =>
        refuse(`line ${known.lines + 1} of the roster (${why})`, "what the server enrolled and signed");
      if (!key || previous !== known.hash) throw wrong("it does not follow the line before");
      const signed = `fairfold roster{"key": "${key}", "node": "${node}", "previous": "${previous}", "users": ${users}}`;
      if (!(await verified(unhex(signer), unhex(signature!), utf8(signed)))) throw wrong("the server's signer did not sign it");
      known.keys.add(key);
      known.lines++;
      known.bytes += line.length + 1;
      known.hash = hex(await sha256(utf8(line)));
    }
    if (known.lines < named.lines) throw refuse(`a roster of ${known.lines} lines where its invitation names ${named.lines}`, "the one it names");
    if (known.hash !== named.hash) throw refuse("another roster than its invitation names", "one log for all devices");
    await store.put({ roster: known }); // before it takes part
  } else if (named.hash !== known.hash) throw refuse(`another roster of ${known.lines} lines than before`, "one log for all devices");
  if (!known.keys.has(hex(own))) throw refuse("a roster without this device's key", "all that have enrolled");
}

// Refuse a cohort with a member that is not in the log which its invitation named.
export async function requireMembers(store: Store, named: LogHead, members: { name: string; enrolled: Bytes }[]): Promise<void> {
  const log = await store.get<LogCopy>("roster");
  for (const { name, enrolled } of members)
    if (log?.hash !== named.hash || !log.keys.has(hex(enrolled)))
      throw refuse(`device ${name}, whose key is not in the server's roster of ${named.lines} lines`, "devices that have enrolled");
}
