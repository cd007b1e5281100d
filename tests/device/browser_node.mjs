// Browser devices under node, by lines of JSON: a message to one of them in, its reply's objects or the error out.
// node browser_node.mjs PARTS FOLDER
import { createInterface } from "node:readline";
import { base64, device, giveFile, Memory, objectsOf } from "./browser_device.mjs";

const stores = new Map();
for await (const line of createInterface({ input: process.stdin })) {
  const { number, name, capacity, file, holdout, kind, id, objects } = JSON.parse(line);
  if (!stores.has(number)) {
    const store = new Memory();
    await store.put({ device: { id: name, capacity, level: "plain", minCohort: 100 } });
    await giveFile(store, { file }, holdout);
    stores.set(number, store);
  }
  try {
    const { reply } = await new device.Device(stores.get(number)).reply(kind, device.parseRecords(id, objectsOf(objects)));
    const made = new Map(), tree = await device.packRecords(reply, made);
    console.log(JSON.stringify({ id: tree.id, objects: Object.fromEntries([...made].map(([key, one]) => [key, base64(one)])) }));
  } catch (error) {
    console.log(JSON.stringify({ error: String(error.stack) }));
  }
}
