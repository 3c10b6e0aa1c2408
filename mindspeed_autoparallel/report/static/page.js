"use strict";
// What every page has: light and dark, English and Chinese. `tr` returns a text in the language shown.
const tr = (() => {
  const page = document.documentElement, byId = id => document.getElementById(id);
  window.addEventListener("error", event => { page.dataset.error = event.message; });
  const words = new Map(Object.entries(JSON.parse(byId("words").textContent)));
  const changed = () => dispatchEvent(new Event("pagechange"));
  const system = matchMedia("(prefers-color-scheme: dark)");
  function setTheme(theme) {
    if (theme) page.dataset.theme = theme; else delete page.dataset.theme;
    changed();
  }
  byId("theme").addEventListener("click", () => {
    const dark = page.dataset.theme ? page.dataset.theme === "dark" : system.matches;
    setTheme(dark ? "light" : "dark");
  });
  system.addEventListener("change", changed);
  let before;
  addEventListener("beforeprint", () => { before = page.dataset.theme; setTheme("light"); });
  addEventListener("afterprint", () => setTheme(before));

  // Every text and attribute that has a translation, as functions that show one of the two.
  const shown = [], keep = (text, show) => {
    const key = text.trim(), chinese = words.get(key);
    if (chinese !== undefined) shown.push(isChinese => show(isChinese ? text.replace(key, () => chinese) : text));
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (node.parentNode.tagName !== "SCRIPT") keep(node.data, text => { node.data = text; });
  }
  for (const name of ["data-tip", "aria-label", "placeholder"]) {
    for (const one of document.querySelectorAll("[" + name + "]")) {
      keep(one.getAttribute(name), text => one.setAttribute(name, text));
    }
  }
  let isChinese = false;
  function setLanguage(chinese) {
    isChinese = chinese;
    page.lang = chinese ? "zh-CN" : "en";
    byId("language").textContent = chinese ? "English" : "中文";
    shown.forEach(show => show(chinese));
    changed();
  }
  byId("language").addEventListener("click", () => setLanguage(!isChinese));
  addEventListener("load", () => { if (/^zh/.test(navigator.language)) setLanguage(true); });
  return (english, ...values) => {
    let next = 0;
    const text = (isChinese && words.get(english)) || english;
    return text.replace(/\{(\d*)\}/g, (_, place) => values[place === "" ? next++ : Number(place)]);
  };
})();
