// Builds the one file that the wheel carries, and the one that tests look at; with --check says whether they are what the sources give.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { build, transform } from "esbuild";
import { minify } from "terser";

const here = fileURLToPath(new URL(".", import.meta.url));
const targets = { main: "src/fairfold/device/browser.js", parts: "tests/device/browser_parts.js" };

// A built file names the hash of what it was built from, so that a test finds a stale one without this toolchain.
const sources = ["package-lock.json", "build.mjs", ...readdirSync(here + "src").sort().map((name) => "src/" + name)];
const hash = createHash("sha256");
for (const name of sources) hash.update(name + "\0").update(readFileSync(here + name)).update("\0");
const preamble = `// A browser tab as a device of a fleet. Built from browser/src (${hash.digest("hex")}).`;

for (const [name, target] of Object.entries(targets)) {
  const made = await build({
    entryPoints: [`${here}src/${name}.ts`],
    bundle: true, minify: true, charset: "utf8", format: "iife", target: "es2022", write: false,
    plugins: [{ name: "style", setup: ({ onLoad }) => onLoad({ filter: /\.css$/ }, async ({ path }) => {
      const style = await transform(readFileSync(path, "utf8"), { loader: "css", minify: true, target: "es2022" });
      return { contents: style.code, loader: "text" };
    }) }],
  });
  // A second pass, which finds names and forms that compress better: 4 % of the compressed file.
  const { code } = await minify(made.outputFiles[0].text, { ecma: 2022, compress: { passes: 2 }, format: { preamble } });
  if (!process.argv.includes("--check")) writeFileSync(here + "../" + target, code + "\n");
  else if (readFileSync(here + "../" + target, "utf8") !== code + "\n") {
    console.error(`${target} is not what browser/src gives: run \`npm run build\` in browser/`);
    process.exit(1);
  }
}
