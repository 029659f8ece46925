// A table that scrolls by itself where it is too wide for the page.

import { h } from "./dom.js";

export class Table {
  /** columns: [{title, show(row, rows), number, head, wrap, hint}]; show gives text, a node, or a list of both. */
  constructor(place, caption, empty, columns) {
    this.columns = columns;
    const heads = columns.map(({ title, number, hint }) => h("th", { scope: "col", class: number ? "number" : null, title: hint }, title || h("span", { class: "hidden" }, "what")));
    this.body = h("tbody");
    this.scroll = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, h("table", null, h("caption", { class: "hidden" }, caption), h("thead", null, h("tr", null, heads)), this.body));
    this.nothing = h("p", { class: "empty" }, empty);
    place.replaceChildren(this.scroll, this.nothing);
    new ResizeObserver(() => this.#reach()).observe(this.scroll);
  }

  update(rows) {
    this.scroll.hidden = rows.length === 0;
    this.nothing.hidden = rows.length > 0;
    // An element that has the focus is about to be replaced: the one at its place gets it.
    const focused = [...this.body.querySelectorAll("button")].indexOf(document.activeElement);
    this.body.replaceChildren(...rows.map((row) => h("tr", null, this.columns.map((column) => this.#cell(column, row, rows)))));
    if (focused >= 0) this.body.querySelectorAll("button")[focused]?.focus();
    this.#reach();
  }

  #cell({ show, number, head, wrap }, row, rows) {
    const classes = [number ? "number" : "", wrap ? "wrap" : ""].join(" ").trim() || null;
    return h(head ? "th" : "td", { scope: head ? "row" : null, class: classes }, show(row, rows));
  }

  /** A stop of the tab key only where there is something to scroll. */
  #reach() {
    if (this.scroll.scrollWidth > this.scroll.clientWidth + 1) this.scroll.setAttribute("tabindex", 0);
    else this.scroll.removeAttribute("tabindex");
  }
}
