// The timeline: a lane for each stream, each launch in the colour of its module. Drawn on a canvas, because there are many.

const AXIS = 24;
const GUTTER = 62;
const GREY = "#8c877d";
const NEAREST = 6;

class Timeline {
  constructor(data, rows) {
    this.rows = rows;
    this.streams = data.streams;
    this.startOf = Float64Array.from(data.launches.start_us);
    this.timeOf = Float64Array.from(data.launches.duration_us);
    this.rowOf = Int32Array.from(data.launches.row);
    this.siteOf = Int32Array.from(data.launches.site);
    this.laneOf = Int32Array.from(data.launches.stream);
    this.order = Uint32Array.from(this.rowOf.keys()).sort((a, b) => this.startOf[a] - this.startOf[b]);
    this.lanes = this.streams.map(() => []);
    for (const i of this.order) this.lanes[this.laneOf[i]].push(i);
    const ends = this.startOf.map((start, i) => start + this.timeOf[i]);
    this.whole = { name: "the whole trace", start: 0, end: ends.reduce((a, b) => Math.max(a, b), 1) };
    this.windows = [this.whole, ...this.replays(data.launches.replay)];
    this.chosen = -1;
    this.canvas = byId("canvas");
    this.laneHeight = this.lanes.length > 3 ? 30 : 46;
    this.left = this.lanes.length > 1 ? GUTTER : 0;
  }

  /** A window for each replay, by what was replayed. */
  replays(numbers) {
    const found = new Map();
    numbers.forEach((number, i) => {
      if (number < 0) return;
      const end = this.startOf[i] + this.timeOf[i];
      const known = found.get(number);
      if (known === undefined) found.set(number, { phase: this.rows.rows[this.rowOf[i]].phase, start: this.startOf[i], end });
      else {
        known.start = Math.min(known.start, this.startOf[i]);
        known.end = Math.max(known.end, end);
      }
    });
    const counts = new Map();
    return [...found.values()].sort((a, b) => a.start - b.start).map((one) => {
      counts.set(one.phase, (counts.get(one.phase) ?? 0) + 1);
      const name = `${one.phase || "graph"}, replay ${counts.get(one.phase)}: ${duration(one.end - one.start)}`;
      return { ...one, name };
    });
  }

  start() {
    byId("timeline-view").hidden = false;
    this.readColours();
    const select = byId("window");
    select.append(...this.windows.map((window, i) => element("option", { value: i }, window.name)));
    select.addEventListener("change", () => this.show(Number(select.value)));
    byId("before").addEventListener("click", () => this.show(Math.max(this.current - 1, 0)));
    byId("after").addEventListener("click", () => this.show(Math.min(this.current + 1, this.windows.length - 1)));
    byId("closer").addEventListener("click", () => this.zoom(0.5));
    byId("farther").addEventListener("click", () => this.zoom(2));
    byId("whole").addEventListener("click", () => this.show(0));
    this.listen();
    this.rows.onChange.push(() => this.draw());
    this.legend();
    this.show(this.middleReplay());
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  /** One that stands for the others: of the phase with the most replays, the one in the middle. */
  middleReplay() {
    const ofPhase = new Map();
    this.windows.forEach((window, i) => { if (i) ofPhase.set(window.phase, [...(ofPhase.get(window.phase) ?? []), i]); });
    const most = [...ofPhase.values()].sort((a, b) => b.length - a.length)[0];
    return most ? most[Math.floor(most.length / 2)] : 0;
  }

  readColours() {
    const read = (name) => {
      const probe = element("i", { class: name });
      document.body.append(probe);
      const colour = getComputedStyle(probe).getPropertyValue("--c").trim();
      probe.remove();
      return colour;
    };
    const known = new Map([...new Set(this.rows.groups.ofRow)].map((name) => [name, read(name)]));
    this.colourOf = this.rows.groups.ofRow.map((name) => known.get(name));
  }

  legend() {
    const { colours, hasOther, hasOutside } = this.rows.groups;
    const entries = [...colours.entries()];
    const items = entries.map(([name, colour]) => {
      const button = element("button", { type: "button", class: colour, "aria-pressed": "false", "data-module": name }, name);
      button.addEventListener("click", () => this.rows.filterBy(byId("filter").value === name ? "" : name));
      return element("li", { class: "entry" }, button);
    });
    if (hasOther || hasOutside) {
      items.push(element("li", { class: "rest" }, [hasOther && OTHER, hasOutside && OUTSIDE].filter(Boolean).join(", ")));
    }
    byId("modules").append(...items);
  }

  show(number) {
    this.current = number;
    byId("window").value = number;
    byId("before").disabled = number === 0;
    byId("after").disabled = number === this.windows.length - 1;
    this.view = { start: this.windows[number].start, end: this.windows[number].end };
    this.draw();
    const window = this.windows[number];
    byId("told").textContent = clean(`${window.name}${number ? "" : `, ${duration(window.end)}`}`);
  }

  /** Around a time, by default the middle; never beyond the trace. */
  zoom(factor, around = (this.view.start + this.view.end) / 2) {
    const length = Math.min(Math.max((this.view.end - this.view.start) * factor, 0.5), this.whole.end);
    const share = (around - this.view.start) / (this.view.end - this.view.start);
    this.moveTo(around - share * length, length);
  }

  moveTo(start, length) {
    const from = Math.min(Math.max(start, 0), this.whole.end - length);
    this.view = { start: from, end: from + length };
    this.draw();
  }

  // ---- drawing

  draw() {
    const width = this.canvas.clientWidth;
    const height = AXIS + this.laneHeight * this.lanes.length;
    if (!width) return;
    const ratio = Math.max(devicePixelRatio, 1);
    this.canvas.style.height = `${height}px`;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    const brush = this.canvas.getContext("2d");
    brush.scale(ratio, ratio);
    this.drawAxis(brush, width, height);
    if (this.left) this.streams.forEach((_, number) => this.drawStream(brush, number));
    brush.beginPath();
    brush.rect(this.left, AXIS, width, height);
    brush.clip();
    this.lanes.forEach((lane, number) => this.drawLane(brush, lane, number, width));
    if (this.chosen >= 0) this.drawChosen(brush, width);
    const filter = byId("filter").value;
    for (const button of byId("modules").querySelectorAll("button")) {
      button.setAttribute("aria-pressed", button.dataset.module === filter);
    }
  }

  drawAxis(brush, width, height) {
    const length = this.view.end - this.view.start;
    const least = (length * 90) / (width - this.left);
    const power = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= least);
    const origin = this.windows[this.current].start;
    brush.font = "11px system-ui, sans-serif";
    brush.fillStyle = GREY;
    for (let time = Math.ceil((this.view.start - origin) / step) * step + origin; time < this.view.end; time += step) {
      const x = this.place(time, width);
      brush.globalAlpha = 0.25;
      brush.fillRect(x, AXIS - 6, 1, height);
      brush.globalAlpha = 1;
      if (x < width - 40) brush.fillText(duration(time - origin), x + 3, 12);
    }
  }

  drawLane(brush, lane, number, width) {
    const top = AXIS + this.laneHeight * number + 2;
    const chosenRow = this.rows.chosen;
    let reached = -1;
    for (let at = this.firstIn(lane); at < lane.length && this.startOf[lane[at]] < this.view.end; at += 1) {
      const i = lane[at];
      const left = this.place(this.startOf[i], width);
      const right = this.place(this.startOf[i] + this.timeOf[i], width);
      if (right < reached + 0.7) continue; // in a pixel that has its colour
      const row = this.rowOf[i];
      brush.globalAlpha = !this.rows.matches[row] || (chosenRow >= 0 && chosenRow !== row) ? 0.22 : 1;
      brush.fillStyle = this.colourOf[row];
      const shown = Math.max(right - left - (right - left > 3 ? 0.8 : 0), 0.8);
      brush.fillRect(left, top, shown, this.laneHeight - 5);
      if (shown > 56) this.drawName(brush, this.rows.rows[row].kernel, left, top, shown);
      reached = right;
    }
    brush.globalAlpha = 1;
  }

  /** Where a time is across. */
  place(time, width) {
    return this.left + ((time - this.view.start) / (this.view.end - this.view.start)) * (width - this.left);
  }

  drawStream(brush, number) {
    brush.font = "11px system-ui, sans-serif";
    brush.fillStyle = GREY;
    const middle = AXIS + this.laneHeight * (number + 0.5);
    brush.fillText(clean(`stream ${this.streams[number]}`), 0, middle + 2, GUTTER - 8);
  }

  drawName(brush, name, left, top, width) {
    brush.save();
    brush.beginPath();
    brush.rect(left, top, width - 4, this.laneHeight);
    brush.clip();
    brush.font = "600 11px system-ui, sans-serif";
    brush.fillStyle = "#fff";
    brush.fillText(clean(name).slice(0, 80), Math.max(left, this.left) + 5, top + this.laneHeight / 2 + 2);
    brush.restore();
  }

  drawChosen(brush, width) {
    const i = this.chosen;
    const [left, right] = [this.startOf[i], this.startOf[i] + this.timeOf[i]].map((time) => this.place(time, width));
    brush.strokeStyle = GREY;
    brush.lineWidth = 2;
    brush.strokeRect(left - 1, AXIS + this.laneHeight * this.laneOf[i] + 1, Math.max(right - left, 2) + 1, this.laneHeight - 3);
  }

  /** Where in a lane the view begins; one before it may reach into it. */
  firstIn(lane) {
    let low = 0;
    let high = lane.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.startOf[lane[middle]] < this.view.start) low = middle + 1;
      else high = middle;
    }
    return Math.max(low - 1, 0);
  }

  // ---- pointing, clicking, keys

  listen() {
    let dragged = null;
    this.canvas.addEventListener("pointerdown", (event) => {
      dragged = { x: event.clientX, start: this.view.start, isMoved: false };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (dragged === null) this.point(event);
      else if (dragged.isMoved || Math.abs(event.clientX - dragged.x) > 4) {
        const length = this.view.end - this.view.start;
        dragged.isMoved = true;
        hideTip();
        this.moveTo(dragged.start - ((event.clientX - dragged.x) / this.canvas.clientWidth) * length, length);
      }
    });
    this.canvas.addEventListener("pointerup", (event) => {
      if (dragged !== null && !dragged.isMoved) this.take(this.at(event));
      dragged = null;
    });
    this.canvas.addEventListener("pointerleave", hideTip);
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.timeAt(event));
    }, { passive: false });
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  timeAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - this.left) / (box.width - this.left);
    return this.view.start + share * (this.view.end - this.view.start);
  }

  /** The launch under the pointer, or the nearest within a few pixels; -1 if there is none. */
  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const lane = this.lanes[Math.floor((event.clientY - box.top - AXIS) / this.laneHeight)];
    if (lane === undefined) return -1;
    const time = this.timeAt(event);
    let nearest = (NEAREST * (this.view.end - this.view.start)) / box.width;
    let found = -1;
    for (let at = this.firstIn(lane); at < lane.length && this.startOf[lane[at]] <= time + nearest; at += 1) {
      const i = lane[at];
      const away = Math.max(this.startOf[i] - time, time - this.startOf[i] - this.timeOf[i], 0);
      if (away <= nearest) [nearest, found] = [away, i];
    }
    return found;
  }

  words(i) {
    const row = this.rows.rows[this.rowOf[i]];
    const site = row.sites[this.siteOf[i]];
    const since = `at ${duration(this.startOf[i] - this.windows[this.current].start)}, stream ${this.streams[this.laneOf[i]]}`;
    return [row.kernel, `${duration(this.timeOf[i])} ${since}`, site.module || OUTSIDE, row.place, row.shown_call].filter(Boolean);
  }

  point(event) {
    const i = this.at(event);
    if (i < 0) hideTip();
    else showTip(this.words(i).join("\n"), new DOMRect(event.clientX, event.clientY - 8, 0, 16));
  }

  take(i) {
    this.chosen = i;
    if (i >= 0) byId("told").textContent = clean(this.words(i).join(", "));
    this.rows.choose(i < 0 ? -1 : this.rowOf[i], i < 0 ? 0 : this.siteOf[i]);
    this.canvas.focus({ preventScroll: true });
  }

  onKey(event) {
    const zooms = { "+": 0.5, "=": 0.5, "-": 2 };
    if (event.key === "ArrowRight" || event.key === "ArrowLeft") this.step(event.key === "ArrowRight" ? 1 : -1);
    else if (event.key in zooms) this.zoom(zooms[event.key], this.chosen < 0 ? undefined : this.startOf[this.chosen]);
    else if (event.key === "Home") this.show(0);
    else if (event.key === "Enter" && this.chosen >= 0) {
      this.take(this.chosen);
      byId("detail").focus();
    } else return;
    event.preventDefault();
  }

  /** The next launch, or the one before; the view follows it. */
  step(by) {
    const visible = (i) => this.startOf[i] >= this.view.start && this.startOf[i] <= this.view.end;
    const now = this.chosen < 0 ? -1 : this.order.indexOf(this.chosen);
    const next = now < 0 ? this.order.findIndex(visible) : Math.min(Math.max(now + by, 0), this.order.length - 1);
    if (next < 0) return;
    this.chosen = this.order[next];
    const length = this.view.end - this.view.start;
    if (visible(this.chosen)) this.draw();
    else this.moveTo(this.startOf[this.chosen] - length / 2, length);
    byId("told").textContent = clean(this.words(this.chosen).join(", "));
  }
}

if (table) new Timeline(KERNELS, table).start();
