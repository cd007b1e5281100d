// The long-lived part of a device: keeps the connection, polls, replies. It runs in a worker, which background tabs keep.

import type { Bytes } from "./bytes";
import { PulledMessage, reasonOf } from "./exchange";
import { Connection, Refused, type Call } from "./link";
import type { Identity, Store } from "./state";
import { Device, mostBytes, type Result } from "./tasks";

const BUSY_POLL = 500, IDLE_POLL = 3000, BUSY_FOR = 60_000; // milliseconds; a while after some work it polls more often
const MAX_PAUSE = 20_000, MAX_REFUSED_PAUSE = 300_000, RETRY_PAUSES = [1000, 2000, 4000, 8000], MAX_LOG = 200;

export interface Status {
  state: "connecting" | "connected" | "working" | "waiting" | "refused";
  message: string;
}

export interface LogEntry {
  at: number;
  kind: string;
  seconds: number;
  received: number;
  sent: number;
  round?: number;
  quality?: number;
  evaluated?: number;
  problem?: string;
}

const pause = (milliseconds: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, milliseconds));
const about = (milliseconds: number): number => milliseconds * (0.8 + 0.4 * Math.random());

export class Loop {
  private node: bigint | null = null;
  private nextHeartbeat = 0;
  private lastWork = -Infinity;
  private readonly connection: Connection;
  private readonly device: Device;
  private stopped = false;

  constructor(
    private readonly store: Store,
    private readonly me: Identity,
    private readonly report: (status: Status, entry?: LogEntry) => void,
  ) {
    this.connection = new Connection(me);
    this.device = new Device(store, () => this.tick());
  }

  async serve(): Promise<void> {
    const node = await this.store.get<string>("node");
    if (node) this.node = BigInt("0x" + node); // a reloaded page: the server may still hold its connection
    for (let retries = 0; !this.stopped; ) {
      try {
        await this.connect();
        retries = 0;
        await this.poll();
      } catch (error) {
        if (this.stopped) return;
        const refused = error instanceof Refused ? error : new Refused("refused", error instanceof Error ? error.message : String(error));
        if (!["unreachable", "busy"].includes(refused.kind)) this.node = null;
        this.report({ state: refused.passes ? "waiting" : "refused", message: refused.message });
        await pause(about(Math.min(1000 * 2 ** retries, refused.passes ? MAX_PAUSE : MAX_REFUSED_PAUSE)));
        retries = Math.min(retries + 1, 10);
      }
    }
  }

  // End: notify the server, where it can be reached. What is stored is deleted by the page.
  async leave(): Promise<void> {
    this.stopped = true;
    if (this.node !== null) await this.connection.deactivate(this.node).catch(() => {});
  }

  private async connect(): Promise<void> {
    if (this.node === null || !(await this.beat())) {
      this.report({ state: "connecting", message: "Connecting." });
      this.node = await this.connection.activate();
      await this.store.put({ node: this.node.toString(16) });
      await this.beat();
    }
    this.report({ state: "connected", message: "Connected: waiting for a round." });
  }

  private async beat(): Promise<boolean> {
    const accepted = await this.connection.heartbeat(this.node!);
    this.nextHeartbeat = performance.now() + this.connection.heartbeatInterval * (600 + 200 * Math.random());
    return accepted;
  }

  // Between two users of a long task: the server must not take this device for gone.
  private async tick(): Promise<void> {
    if (performance.now() > this.nextHeartbeat && this.node !== null) await this.beat();
  }

  private async poll(): Promise<void> {
    await this.refuseInterrupted();
    while (!this.stopped) {
      if (performance.now() > this.nextHeartbeat && !(await this.beat()))
        throw new Refused("lost", "The server does not hold this connection any more.");
      const response = await this.connection.pull(this.node!);
      if (response) await this.replyTo(response);
      else await pause(performance.now() - this.lastWork < BUSY_FOR ? BUSY_POLL : Math.max(IDLE_POLL, about(1000 * this.connection.pollInterval)));
    }
  }

  // A request of a reply that the network lost is sent again.
  private readonly call: Call = async (name, body) => {
    for (const milliseconds of RETRY_PAUSES) {
      try {
        return await this.connection.call(name, body);
      } catch (error) {
        if (!(error instanceof Refused) || !["unreachable", "busy"].includes(error.kind)) throw error;
      }
      await pause(milliseconds);
    }
    return this.connection.call(name, body);
  };

  // An earlier page was closed at work on a message: the server learns it, and need not wait.
  private async refuseInterrupted(): Promise<void> {
    const response = await this.store.get<Bytes>("open");
    if (!response) return;
    await this.store.put({ open: null }); // before: a message that ends a tab must not do so for ever
    await new PulledMessage(this.call, response).send("InvalidState: a page that was closed at work; needed: one that stays open.", 0).catch(() => {});
  }

  private async replyTo(response: Bytes): Promise<void> {
    const started = performance.now(), { received, sent } = this.connection, message = new PulledMessage(this.call, response);
    const entry: LogEntry = { at: Date.now(), kind: message.kind, seconds: 0, received: 0, sent: 0 };
    this.report({ state: "working", message: "Taking part in a round." });
    let result: Result | null = null, reason = "", isOpen = false;
    try {
      await this.store.put({ open: response });
      isOpen = true;
      result = await this.device.reply(message.kind, await message.fetch(mostBytes(this.me, message.kind)));
    } catch (error) {
      if (error instanceof Refused) throw error;
      reason = reasonOf(error);
      entry.problem = error instanceof Error ? error.message : String(error);
    }
    await message.confirm();
    if (isOpen) await this.store.put({ open: null }); // before: a page that comes after this one must not reply again
    await message.send(result?.reply ?? reason, (performance.now() - started) / 1000);
    Object.assign(entry, result?.shown, {
      seconds: (performance.now() - started) / 1000, received: this.connection.received - received, sent: this.connection.sent - sent,
    });
    const log = ((await this.store.get<LogEntry[]>("log").catch(() => [])) ?? []).concat(entry).slice(-MAX_LOG);
    await this.store.put({ log }).catch(() => {}); // a full disk is no reason to stop
    this.lastWork = performance.now();
    this.report({ state: "connected", message: entry.problem ? `Connected. The last message could not be answered: ${entry.problem}` : "Connected: waiting for the next round." }, entry);
  }
}
