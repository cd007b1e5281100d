// How a device fetches the objects of a message and sends its reply: fairfold.device.exchange.

import { hex, invalid, join, Refusal, sha256, text, type Bytes } from "./bytes";
import type { Call } from "./link";
import {
  allOf, bytesField, bytesIn, doubleField, doubleIn, numberField, numberIn, packedDoubles, parseFields, textField, textIn,
} from "./protobuf";
import { addObject, packRecords, packTree, parseRecords, splitObject, type Objects, type Records, type Reply, type Tree } from "./records";

const APP_RAISED_EXCEPTION = 4; // Flower's code of an error in a reply
const FETCH_PAUSES = [100, 300, 1000, 2000, 4000, 8000]; // milliseconds: a message may be announced before its objects are there
const MAX_OBJECTS = 1 << 16; // of a message
const NOTHING = new Uint8Array(0);

// A message that was pulled: metadata, and the tree of its objects, which are fetched one by one.
export class PulledMessage {
  readonly run: bigint;
  readonly kind: string;
  readonly id: string;
  readonly deadline: number; // seconds since the epoch
  private readonly metadata;
  private readonly head: Bytes;
  private readonly tree: Bytes;

  constructor(private readonly call: Call, response: Bytes) {
    const fields = parseFields(response);
    this.metadata = parseFields(bytesIn(parseFields(bytesIn(fields, 2)), 1));
    this.tree = bytesIn(fields, 3);
    this.run = numberIn(this.metadata, 1);
    this.kind = textIn(this.metadata, 8);
    this.id = textIn(parseFields(this.tree), 1);
    this.deadline = doubleIn(this.metadata, 9) + doubleIn(this.metadata, 7);
    this.head = bytesField(1, numberField(1, numberIn(this.metadata, 4)));
  }

  // All objects, of at most so many bytes, checked by their ids, as the message's records; nothing is confirmed yet.
  async fetch(most: number): Promise<Records> {
    const objects: Objects = new Map(), pending = [this.tree];
    let size = 0;
    for (let tree = pending.pop(); tree; tree = pending.pop()) {
      const fields = parseFields(tree), id = textIn(fields, 1);
      pending.push(...allOf(fields, 2));
      if (objects.has(id)) continue;
      const content = await this.fetchObject(id);
      objects.set(id, content);
      size += content.length;
      if (objects.size > MAX_OBJECTS || size > most) throw invalid("a message that is too large", `at most ${most} bytes`);
    }
    return parseRecords(splitObject(objects.get(this.id)).children[0] ?? "", objects);
  }

  private async fetchObject(id: string): Promise<Bytes> {
    let content = NOTHING;
    for (const pause of FETCH_PAUSES) {
      const fields = parseFields(await this.call("pull-object", join(this.head, numberField(2, this.run), textField(3, id))));
      content = bytesIn(fields, 3);
      if (content.length || !numberIn(fields, 1)) break;
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
    if (hex(await sha256(content)) !== id)
      throw new Refusal("InvalidMessage", "an object that is gone, or is another", "what the message names", "It is sent again.");
    return content;
  }

  async confirm(): Promise<void> {
    await this.call("confirm-message-received", join(this.head, numberField(2, this.run), textField(3, this.id)));
  }

  // The request that announces a reply, or the reason why there is none, and the objects that go with it.
  async packReply(reply: Reply | string, now: number, seconds: number): Promise<{ request: Bytes; objects: Objects }> {
    const objects: Objects = new Map(), records: Tree[] = typeof reply === "string" ? [] : [await packRecords(reply, objects)];
    const error = typeof reply === "string" ? bytesField(3, join(numberField(1, APP_RAISED_EXCEPTION), textField(2, reply))) : NOTHING;
    const tree = await addObject("Message", records, join(bytesField(1, this.replyMetadata("", now)), error), objects);
    // The content is empty here, but present: else the server finds neither content nor error.
    const message = join(bytesField(1, this.replyMetadata(tree.id, now)), error.length ? error : bytesField(2, NOTHING));
    return { request: join(this.head, bytesField(2, message), bytesField(3, packTree(tree)), packedDoubles(4, seconds)), objects };
  }

  async send(reply: Reply | string, seconds: number): Promise<void> {
    const { request, objects } = await this.packReply(reply, Date.now() / 1000, seconds);
    const accepted = parseFields(await this.call("push-messages", request)), session = bytesIn(accepted, 4);
    for (const id of allOf(accepted, 3)) {
      const content = objects.get(text(id)) ?? NOTHING;
      await this.call("push-object", join(this.head, numberField(2, this.run), bytesField(3, id), bytesField(4, content), bytesField(5, session)));
    }
  }

  private replyMetadata(id: string, now: number): Bytes {
    const asked = this.metadata;
    return join(
      numberField(1, this.run), textField(2, id), numberField(3, numberIn(asked, 4)), numberField(4, numberIn(asked, 3)),
      textField(5, this.id), textField(6, textIn(asked, 6)), doubleField(7, this.deadline - now), textField(8, this.kind),
      doubleField(9, now), numberField(10, numberIn(asked, 11)), numberField(11, numberIn(asked, 10)),
    );
  }
}

// What the server learns of an error: its kind alone, since its text may quote names of items and users.
export function reasonOf(error: unknown): string {
  const name = error instanceof Error ? error.name : "Error";
  const quoted = error instanceof Refusal && error.kind === "RequestRefused" ? `: ${error.given}; needed: ${error.needed}` : "";
  return `InvalidState: ${name} on the device${quoted}; needed: a device that can reply. Its own page has the details.`;
}

