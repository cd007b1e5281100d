// Builds the one file that the wheel carries; with --check says whether it is what the sources give.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { build, transform } from "esbuild";

const here = fileURLToPath(new URL(".", import.meta.url));
const target = here + "../src/fairfold/device/browser.js";

// The built file names the hash of what it was built from, so that a test finds a stale one without this toolchain.
const sources = ["package-lock.json", "build.mjs", ...readdirSync(here + "src").sort().map((name) => "src/" + name)];
const hash = createHash("sha256");
for (const name of sources) hash.update(name + "\0").update(readFileSync(here + name)).update("\0");

const made = await build({
  entryPoints: [here + "src/main.ts"],
  bundle: true, minify: true, charset: "utf8", format: "iife", target: "es2022", write: false,
  plugins: [{ name: "style", setup: ({ onLoad }) => onLoad({ filter: /\.css$/ }, async ({ path }) => {
    const style = await transform(readFileSync(path, "utf8"), { loader: "css", minify: true, target: "es2022" });
    return { contents: style.code, loader: "text" };
  }) }],
  banner: { js: `// A browser tab as a device of a fleet. Built from browser/src (${hash.digest("hex")}).` },
});
const text = made.outputFiles[0].text;
if (process.argv.includes("--check")) {
  if (readFileSync(target, "utf8") !== text) {
    console.error("src/fairfold/device/browser.js is not what browser/src gives: run `npm run build` in browser/");
    process.exit(1);
  }
} else writeFileSync(target, text);
