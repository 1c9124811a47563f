// The table of kernels: sorted, filtered, and looked into. Only the rows that are seen are made.

const KERNELS = DATA.kernels?.rows.length ? DATA.kernels : null;
const ROW_HEIGHT = 46;
const SEEN_ROWS = 13; // at most: the style sheet limits the height
const SPARE_ROWS = 8;
const MOST_COLOURS = 9;
const MOST_SITES = 12;
const OUTSIDE = "outside of modules";
const OTHER = "other modules";

const COLUMNS = [
  { key: "percent", title: "%", isNumber: true, text: (row) => row.percent.toFixed(1) },
  { key: "total_us", title: "Total", isNumber: true, text: (row) => duration(row.total_us) },
  { key: "instances", title: "Launches", isNumber: true, text: (row) => row.instances.toLocaleString("en") },
  { key: "avg_us", title: "Average", isNumber: true, text: (row) => duration(row.avg_us) },
  { key: "kernel", title: "Kernel" },
  { key: "shown_call", title: "Call" },
  { key: "place", title: "Line" },
  { key: "phase", title: "Phase", isOptional: true },
  { key: "groups", title: "Group", isOptional: true, text: (row) => row.groups.join(", ") },
].map((column) => ({ text: (row) => row[column.key], ...column }));

const HOWS = {
  call: "the op was seen as it was called: the line is exact",
  stack: "by the ranges that the profiler saw around the launch",
  "node id": "inside a graph, and the profiler names the node",
  position: "inside a graph: as many kernels as nodes, and all names agree",
  step: "inside a graph of which only the step is known",
  none: "not known",
};

/** Modules as they are coloured: cut off where there are few enough of them. */
function colourGroups(rows) {
  const cut = (module, depth) => module.split(".").slice(0, depth).join(".");
  const modules = [...new Set(rows.map((row) => row.module))];
  const number = (depth) => new Set(modules.map((module) => cut(module, depth))).size;
  let depth = 1;
  while (depth < 8 && number(depth + 1) <= MOST_COLOURS + 1) depth += 1;
  const times = new Map();
  const nameOf = new Map(modules.map((module) => [module, module ? cut(module, depth) : OUTSIDE]));
  const names = rows.map((row) => nameOf.get(row.module));
  rows.forEach((row, i) => times.set(names[i], (times.get(names[i]) ?? 0) + row.total_us));
  const ranked = [...times.keys()].filter((name) => name !== OUTSIDE).sort((a, b) => times.get(b) - times.get(a));
  const colours = new Map(ranked.slice(0, MOST_COLOURS).map((name, i) => [name, `c${i}`]));
  return {
    colours, hasOther: ranked.length > MOST_COLOURS, hasOutside: times.has(OUTSIDE),
    ofRow: names.map((name) => colours.get(name) ?? "rest"),
  };
}

class KernelTable {
  constructor(data) {
    this.rows = data.rows;
    this.lines = data.lines;
    this.groups = colourGroups(this.rows);
    const isTelling = (column) => new Set(this.rows.map((row) => String(column.text(row)))).size > 1;
    this.columns = COLUMNS.filter((column) => !column.isOptional || isTelling(column));
    this.order = this.rows.map((_, i) => i);
    this.matches = new Uint8Array(this.rows.length).fill(1);
    this.sorted = { key: "total_us", isUp: false };
    this.active = 0;
    this.chosen = -1;
    this.numArranged = 0;
    this.onChange = [];
    this.grid = byId("grid");
    this.scroller = byId("rows");
    this.detail = byId("detail");
    this.total = this.rows.reduce((sum, row) => sum + row.total_us, 0);
    this.most = this.rows.reduce((most, row) => Math.max(most, row.total_us), 0) || 1;
  }

  start() {
    byId("kernel-view").hidden = false;
    this.grid.tabIndex = 0;
    this.grid.tHead.append(element("tr", {}, ...this.columns.map((column) => this.headCell(column))));
    this.scroller.addEventListener("scroll", () => this.draw(), { passive: true });
    this.grid.tBodies[0].addEventListener("click", (event) => {
      const line = event.target.closest("[aria-rowindex]");
      if (line) this.choose(this.order[Number(line.getAttribute("aria-rowindex")) - 2]);
    });
    this.grid.addEventListener("keydown", (event) => this.onKey(event));
    byId("filter").addEventListener("input", () => this.arrange());
    document.addEventListener("keydown", (event) => this.onPageKey(event));
    this.arrange();
  }

  headCell(column) {
    const button = element("button", { type: "button" }, column.title);
    button.addEventListener("click", () => this.sort(column.key));
    const number = column.isNumber ? " number" : "";
    return element("th", { scope: "col", class: `col-${column.key}${number}`, "data-key": column.key }, button);
  }

  /** By a column; numbers begin with the largest, words with A, and the second time it is the other way round. */
  sort(key) {
    const column = this.columns.find((each) => each.key === key);
    this.sorted = { key, isUp: this.sorted.key === key ? !this.sorted.isUp : !column.isNumber };
    this.arrange();
  }

  filterBy(text) {
    byId("filter").value = text;
    this.arrange();
  }

  /** What every word of the filter is looked for in; made when it is first needed. */
  haystack(index) {
    this.haystacks ??= this.rows.map((row) =>
      [row.kernel, row.shown_call, row.call, row.module || OUTSIDE, row.place, row.phase, row.how, ...row.groups, ...row.full_names]
        .join("\n").toLowerCase());
    return this.haystacks[index];
  }

  arrange() {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    this.rows.forEach((_, i) => {
      this.matches[i] = words.every((word) => this.haystack(i).includes(word));
    });
    const { key, isUp } = this.sorted;
    const column = this.columns.find((each) => each.key === key);
    const value = column.isNumber ? (row) => row[key] : (row) => String(column.text(row));
    const values = this.rows.map(value);
    const compare = column.isNumber ? (a, b) => a - b : (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    this.order = this.rows.map((_, i) => i).filter((i) => this.matches[i]);
    this.order.sort((a, b) => (isUp ? 1 : -1) * compare(values[a], values[b]) || a - b);
    for (const cell of this.grid.tHead.rows[0].cells) {
      if (cell.dataset.key === key) cell.setAttribute("aria-sort", isUp ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
    }
    this.active = 0;
    this.numArranged += 1;
    this.scroller.scrollTop = 0;
    this.tell();
    this.draw();
    this.onChange.forEach((each) => each());
  }

  tell() {
    const time = this.order.reduce((sum, i) => sum + this.rows[i].total_us, 0);
    const part = this.total ? ` (${((100 * time) / this.total).toFixed(1)} %)` : "";
    byId("count").textContent = `${count(this.order.length, "row")}, ${duration(time)}${part}`;
  }

  draw() {
    const body = this.grid.tBodies[0];
    const first = Math.max(Math.floor(this.scroller.scrollTop / ROW_HEIGHT) - SPARE_ROWS, 0);
    const last = Math.min(first + SEEN_ROWS + 2 * SPARE_ROWS, this.order.length);
    const state = [first, this.active, this.chosen, this.numArranged].join();
    if (state === this.drawn) return; // a row that is being clicked must not be replaced
    this.drawn = state;
    const shown = [];
    for (let at = first; at < last; at += 1) shown.push(this.line(at));
    body.replaceChildren(this.gap(first), ...shown, this.gap(this.order.length - last));
    this.grid.setAttribute("aria-rowcount", this.order.length + 1);
    this.grid.setAttribute("aria-activedescendant", `line-${this.order[this.active] ?? ""}`);
  }

  gap(rows) {
    const cell = element("td");
    cell.style.height = `${rows * ROW_HEIGHT}px`;
    return element("tr", { class: "gap", "aria-hidden": "true" }, cell);
  }

  line(at) {
    const index = this.order[at];
    const row = this.rows[index];
    const made = element("tr", {
      id: `line-${index}`, "aria-rowindex": at + 2, "aria-selected": index === this.chosen, class: at === this.active ? "active" : null,
    });
    for (const column of this.columns) made.append(this.cell(column, row, index));
    return made;
  }

  cell(column, row, index) {
    const kind = `col-${column.key}${column.isNumber ? " number" : ""}`;
    if (column.key === "kernel") {
      const below = element("small", {}, row.module || OUTSIDE, element("span", { class: "narrow" }, row.place && ` · ${row.place}`));
      return element("td", { class: `${kind} two` }, element("b", {}, row.kernel), below);
    }
    if (column.key !== "percent") return element("td", { class: kind }, column.text(row));
    const bar = element("i", { class: this.groups.ofRow[index] });
    bar.style.width = `calc((100% - 1.2rem) * ${row.total_us / this.most})`;
    return element("td", { class: `${kind} share` }, column.text(row), bar);
  }

  onKey(event) {
    if (event.target !== this.grid) return;
    const page = Math.max(Math.floor(this.scroller.clientHeight / ROW_HEIGHT) - 1, 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in moves) {
      this.active = Math.min(Math.max(this.active + moves[event.key], 0), this.order.length - 1);
      this.reveal();
    } else if (event.key === "Enter" || event.key === " ") {
      if (this.order.length) this.choose(this.order[this.active]);
    } else return;
    event.preventDefault();
  }

  /** Scroll the active row to where it is seen, below the head. */
  reveal() {
    const head = this.grid.tHead.offsetHeight;
    const top = this.active * ROW_HEIGHT;
    const room = this.scroller.clientHeight - head - ROW_HEIGHT;
    this.scroller.scrollTop = Math.min(Math.max(this.scroller.scrollTop, top - room), top);
    this.draw();
  }

  onPageKey(event) {
    if (event.key === "/" && !event.target.closest("input, select")) {
      byId("filter").focus();
      event.preventDefault();
    } else if (event.key === "Escape" && this.chosen >= 0 && event.target.closest("#kernels, #timeline")) this.choose(-1);
  }

  /** Look into a row; -1 closes what is open. */
  choose(index, site = 0) {
    this.chosen = index;
    byId("detail").parentElement.classList.toggle("open", index >= 0);
    this.detail.hidden = index < 0;
    if (index >= 0) {
      this.active = Math.max(this.order.indexOf(index), 0);
      this.detail.replaceChildren(...this.about(this.rows[index], site));
    }
    this.reveal();
    if (index < 0) this.grid.focus({ preventScroll: true });
    else this.detail.scrollIntoView({ block: "nearest" });
    this.onChange.forEach((each) => each());
  }

  about(row, site) {
    const close = element("button", { type: "button", class: "close", "aria-label": "close" }, "×");
    close.addEventListener("click", () => this.choose(-1));
    const names = row.full_names.filter((name) => name && name !== row.kernel);
    const times = {
      Total: `${duration(row.total_us)} (${row.percent.toFixed(1)} %)`, Launches: row.instances.toLocaleString("en"),
      Median: duration(row.med_us), Shortest: duration(row.min_us), Longest: duration(row.max_us), Deviation: duration(row.stddev_us),
    };
    const facts = { Call: row.shown_call, Module: row.module, Phase: row.phase, Group: row.groups.join(", ") };
    const pair = ([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value));
    return [
      close,
      element("h3", {}, row.kernel),
      ...names.map((name) => element("p", { class: "full" }, name)),
      element("dl", {}, ...Object.entries(times).map(pair)),
      element("dl", { class: "wide" }, ...Object.entries(facts).filter(([, value]) => value).map(pair)),
      element("p", { class: "about" }, `Attributed by ${row.how}: ${HOWS[row.how]}.`),
      element("h4", {}, row.sites.length === 1 ? "Launched from" : `Launched from ${row.sites.length} places`),
      ...this.sites(row, site),
    ];
  }

  sites(row, opened) {
    const order = [opened, ...row.sites.keys()].filter((at, i, all) => all.indexOf(at) === i && at < row.sites.length);
    const make = (at) => this.site(row.sites[at], at === opened);
    const made = order.slice(0, MOST_SITES).map(make);
    if (order.length > MOST_SITES) {
      const more = element("button", { type: "button" }, `${order.length - MOST_SITES} more`);
      more.addEventListener("click", () => more.replaceWith(...order.slice(MOST_SITES).map(make)));
      made.push(more);
    }
    return made;
  }

  site(site, isOpen) {
    const times = `${count(site.instances, "launch", "launches")}, ${duration(site.total_us)}`;
    const head = element("summary", {}, site.module || OUTSIDE, " ", element("span", {}, times));
    return element("details", { open: isOpen ? "" : null }, head, ...site.origins.map((origin) => this.origin(origin)));
  }

  /** An op of the model with its stack, the innermost line first. */
  origin(origin) {
    const lines = origin.stack.map((number) => this.lines[number]).reverse();
    const shown = lines.map(([file, line, text]) => {
      const cut = file.lastIndexOf("/") + 1;
      const name = element("b", {}, `${file.slice(cut)}:${line}`);
      return element("li", {}, name, " ", element("small", {}, file.slice(0, cut)), element("code", {}, text));
    });
    const where = origin.module ? ` in ${origin.module}` : "";
    return element("div", {}, element("code", {}, origin.op), where, element("ol", { class: "stack" }, ...shown));
  }
}

const table = KERNELS && new KernelTable(KERNELS);
table?.start();
