// What the tests ask of the page; each is an expression that gives a function.
({
  // For each text that can be seen: [text, contrast to the nearest background, whether it is large].
  contrasts() {
    const parsed = (text) => text.match(/[\d.]+/g).map(Number);
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const light = (colour) => colour.slice(0, 3).reduce((sum, v, n) => sum + linear(v / 255) * [0.2126, 0.7152, 0.0722][n], 0);
    const behind = (element) => {
      for (let at = element; at; at = at.parentElement) {
        const [r, g, b, a = 1] = parsed(getComputedStyle(at).backgroundColor);
        if (a === 1) return [r, g, b];
      }
      return [255, 255, 255];
    };
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      const element = node.parentElement;
      if (!node.data.trim() || !element.checkVisibility() || element.closest(".hidden, script, noscript")) continue;
      const style = getComputedStyle(element);
      const ink = light(parsed(element instanceof SVGElement ? style.fill : style.color));
      const paper = light(behind(element));
      const contrast = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
      found.push([node.data.trim(), contrast, parseFloat(style.fontSize) >= 24]);
    }
    return found;
  },

  // What of the tiles, fills and legends reaches beyond the window's right edge.
  outside() {
    const parts = [...document.querySelectorAll(".tile *, .fill *, .legend *")];
    return parts.filter((part) => part.getBoundingClientRect().right > innerWidth).map((part) => part.outerHTML);
  },

  focused() {
    const at = document.activeElement;
    return at.id || at.getAttribute("aria-label") || at.className;
  },

  // Controls without a name, and pictures that are neither hidden from those who hear the page nor named.
  nameless() {
    const named = (x) => x.getAttribute("aria-label") || x.getAttribute("aria-labelledby") || x.textContent.trim() || x.labels?.length;
    const controls = [...document.querySelectorAll("button, input, section, [role=img], [role=slider], [role=region]")];
    const pictures = [...document.querySelectorAll("svg")].filter((x) => !x.hasAttribute("aria-hidden") && !x.hasAttribute("role"));
    return [...controls.filter((x) => !named(x)), ...pictures].map((x) => x.outerHTML);
  },

  stored() {
    return [Object.values(sessionStorage), Object.values(localStorage), document.cookie];
  },

  // What an expression over a module's functions gives.
  async evaluated([module, expression]) {
    const names = Object.entries(await import(`/ui/${module}.js`));
    return new Function(...names.map(([name]) => name), `return ${expression}`)(...names.map(([, value]) => value));
  },
})
