// Spoiled messages, given to the browser device: node browser_fuzz.mjs PARTS FOLDER < MESSAGES; prints the outcomes.
// A line is a message's session, step, kind, id and objects (tests/device/fuzz.py). What is refused changes nothing.
import { createInterface } from "node:readline";
import { device, drawAs, giveFile, Memory, objectsOf, ownerOf, read } from "./browser_device.mjs";

// What each device has stored before each step.
const before = {};
for (const name of ["session", "secure_session"]) {
  const [given] = read(name).devices, store = new Memory();
  await store.put({ device: await ownerOf(given) });
  before[name] = [];
  for (const step of given.steps) {
    await giveFile(store, step, given.holdout);
    drawAs(step.draws);
    before[name].push(structuredClone(store.parts));
    await new device.Device(store).reply(step.kind, device.parseRecords(step.message.id, objectsOf(step.message.objects)));
  }
}

const outcomes = {}, text = (value) => JSON.stringify(value, (_, of) => (typeof of === "bigint" ? `${of}` : of instanceof Map ? [...of] : of));
for await (const line of createInterface({ input: process.stdin })) {
  const { session, step, kind, id, objects } = JSON.parse(line), stored = before[session][step], store = new Memory();
  store.parts = structuredClone(stored);
  let outcome = "replied";
  try {
    const { reply } = await new device.Device(store).reply(kind, device.parseRecords(id, objectsOf(objects)));
    await device.packRecords(reply, new Map());
  } catch (error) {
    if (!(error instanceof Error)) throw new Error(`no error, but ${error}: ${line.slice(0, 300)}`);
    outcome = error.name;
    // A round of a secure sum ends with a refusal; all else is as it was.
    for (const part of ["data", "state", "memory", "model", "served"])
      if (text(store.parts.get(part)) !== text(stored.get(part))) throw new Error(`${error.stack}, but ${part} is another: ${line.slice(0, 300)}`);
  }
  outcomes[`${kind}: ${outcome}`] = (outcomes[`${kind}: ${outcome}`] ?? 0) + 1;
}
console.log(JSON.stringify(outcomes));
