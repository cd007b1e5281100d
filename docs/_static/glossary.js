// The first use of each word of the glossary on a page shows its meaning when it is pointed at or focused.
addEventListener("DOMContentLoaded", () => {
  const article = document.querySelector("article");
  if (!article || location.pathname.endsWith("concepts.html")) return;
  const words = Object.keys(WORDS).sort((a, b) => b.length - a.length);
  const verb = "(?! (?:it|as|on|over|a|the|this|them|all)\\b)"; // "it runs as": another meaning than that of the noun
  const pattern = new RegExp(`\\b(${words.join("|")})s?\\b${verb}`, "i");
  const seen = new Set();
  const walker = document.createTreeWalker(article, NodeFilter.SHOW_TEXT, {
    acceptNode: node => node.parentElement.closest("p, li") && !node.parentElement.closest("a, code, pre, abbr, nav")
      ? NodeFilter.FILTER_ACCEPT : NodeFilter.FILTER_REJECT,
  });
  const nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  for (let node of nodes) {
    for (let found; (found = pattern.exec(node.data)); ) {
      const word = found[1].toLowerCase();
      const rest = node.splitText(found.index);
      node = rest.splitText(found[0].length);
      if (seen.has(word)) continue;
      seen.add(word);
      const shown = document.createElement("abbr");
      shown.title = WORDS[word];
      shown.tabIndex = 0;
      rest.replaceWith(shown);
      shown.append(rest);
    }
  }
});
