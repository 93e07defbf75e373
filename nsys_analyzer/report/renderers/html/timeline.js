// The timeline as a person uses it: what is shown, moved, found, chosen and summed up.

const LEFT = 186, CLICK = 4, NEAR = 6, LEAST_NS = 20;
/** On paper: the width of the timeline in pixels, as many dots each, and the most of its height that a browser can draw. */
const PAPER = { width: 1000, dots: 2, height: 8000 };

class Timeline {
  constructor(shared, lines) {
    Object.assign(this, { shared, lines, captures: new Map(), left: LEFT, scrolled: 0 });
    this.canvas = document.getElementById("canvas");
    this.scroll = document.getElementById("scroll");
    this.painter = new Painter(this.canvas);
    this.tip = element("div", "", { id: "tip", role: "presentation" });
    this.tip.hidden = true;
    document.body.append(this.tip);
    this.found = false;
    this.hits = new Hits([]);
    this.chosen = this.marked = this.shownGroup = null;
    this.listen();
  }

  /** Shows one of the views: a capture, or the ranks of a run above each other. */
  async show(number) {
    const view = this.shared.views[number];
    this.number = number;
    document.getElementById("view").value = String(number);
    for (const { capture } of view.parts) {
      if (!this.captures.has(capture)) this.captures.set(capture, await unpacked(this.lines[capture]));
    }
    if (this.number !== number) return; // another one was asked for meanwhile
    this.shown = number;
    this.parts = [];
    this.lanes = [];
    let top = HEAD;
    view.parts.forEach((part, place) => {
      const capture = this.captures.get(part.capture);
      const label = view.parts.length > 1 ? part.label : "";
      const begins = top;
      top += label ? PART : BETWEEN;
      for (const lane of lanesOf(capture, part.at, place)) {
        lane.capture = capture;
        if (lane.title && this.lanes.at(-1)?.part === place) top += BETWEEN;
        lane.top = top;
        top += lane.height;
        this.lanes.push(lane);
      }
      const steps = capture.steps.map(([start, end]) => [start + part.at, end + part.at]);
      this.parts.push({ capture, label, top: begins, bottom: top + BETWEEN, steps, start: part.at, end: part.at + capture.duration });
      top += BETWEEN;
    });
    this.height = top + 4;
    this.first = Math.min(...this.parts.map((part) => part.start));
    this.last = Math.max(...this.parts.map((part) => part.end));
    this.letGo();
    const left_out = [...new Set(this.parts.map((part) => part.capture.left_out).filter(Boolean))];
    document.getElementById("note").textContent = [view.note, ...left_out].filter(Boolean).join(" ");
    this.showLegend();
    this.search(document.getElementById("find").value);
    this.fit();
    this.showAll();
    this.showStep(this.medianStep);
    drawFlame(document.getElementById("flame"), this);
  }

  // --- drawing ---

  /** Makes the canvas as large as what is seen of the lanes, which may be higher than any canvas. */
  fit() {
    if (!this.lanes || this.scroll.clientWidth <= LEFT || this.onPaper) return; // nothing of it is to be seen
    document.getElementById("lanes").style.height = `${this.height}px`;
    this.painter.restyle();
    this.left = this.scroll.clientWidth < 700 ? 110 : LEFT;
    this.painter.resize(this.scroll.clientWidth, Math.min(this.height, this.scroll.clientHeight));
    this.redraw();
  }

  /** Draws all lanes in the colors of paper, at once: a browser prints what is there. */
  print() {
    if (!this.lanes) return;
    this.onPaper = true;
    document.documentElement.dataset.paper = "";
    this.painter.restyle();
    [this.left, this.scrolled] = [LEFT, 0];
    this.painter.resize(PAPER.width, Math.min(this.height, PAPER.height), PAPER.dots);
    this.painter.draw(this);
  }

  printed() {
    delete document.documentElement.dataset.paper;
    this.onPaper = false;
    this.fit();
  }

  redraw() {
    if (this.asked || !this.painter.width) return;
    this.asked = true;
    requestAnimationFrame(() => {
      this.asked = false;
      if (this.onPaper) return;
      this.scrolled = this.scroll.scrollTop;
      this.painter.draw(this);
      document.getElementById("stretch").textContent = `${inUnits(this.high - this.low)} from ${this.momentOf(this.low - this.first)} ms on`;
    });
  }

  /** A time in ms, as finely as the stretch that is shown needs. */
  momentOf(ns) {
    const digits = Math.min(Math.max(2 - Math.floor(Math.log10((this.high - this.low) / 1e6)), 0), 6);
    return inMs(ns, digits).replace("-", "−");
  }

  textOf(lane, one) {
    if (lane.kind === "idle") return this.shared.causes[lane.capture.groups[lane.track.group[one]]].text;
    const name = lane.track.name[one];
    return lane.capture.labels[name] || lane.capture.names[name];
  }

  colorOfGroup(lane, group) {
    const name = lane.capture.groups[group];
    const classes = this.shared.classes;
    return lane.kind === "idle" ? this.shared.causes[name].color : (classes[name] ?? classes.other);
  }

  isFaint(lane, one) {
    if (this.found) return !lane.fits(one);
    return this.isFaintGroup(lane, lane.track.group[one]);
  }

  isFaintGroup(lane, group) {
    if (this.found) return true;
    return this.shownGroup !== null && this.shownGroup !== `${lane.kind}:${lane.capture.groups[group]}`;
  }

  showLegend() {
    const sums = new Map();
    for (const lane of this.lanes) {
      for (const [group, row] of lane.groups ?? []) {
        const key = `${lane.kind}:${lane.capture.groups[group]}`;
        const one = sums.get(key) ?? { ns: 0, color: this.colorOfGroup(lane, group), idle: lane.kind === "idle", name: lane.capture.groups[group] };
        one.ns += row.covered.at(-1);
        sums.set(key, one);
      }
    }
    const legend = document.getElementById("legend");
    legend.replaceChildren();
    const sorted = [...sums].sort((a, b) => a[1].idle - b[1].idle || b[1].ns - a[1].ns);
    for (const [key, one] of sorted) {
      const patch = element("i");
      patch.style.background = one.color;
      const entry = element("button", "", { type: "button", "data-group": key, "aria-pressed": "false", title: "Press to see it alone" });
      entry.addEventListener("click", () => this.showAlone(this.shownGroup === key ? null : key));
      entry.append(patch, one.idle ? `idle: ${this.shared.causes[one.name].text}` : one.name);
      legend.append(entry);
    }
    if (this.lanes.some((lane) => lane.critical)) {
      const entry = element("span", "", { class: "path", title: "What the end of a step waits for" });
      entry.append(element("i"), "on the critical path; elsewhere the program is");
      legend.append(entry);
    }
  }

  /** Shows one color of the legend alone; null is all of them. */
  showAlone(group) {
    this.shownGroup = group;
    for (const entry of document.querySelectorAll("#legend button")) entry.setAttribute("aria-pressed", String(entry.dataset.group === group));
    this.redraw();
  }

  // --- moving ---

  timeAt(x) {
    return this.low + ((x - this.left) * (this.high - this.low)) / (this.painter.width - this.left);
  }

  look(low, high) {
    const whole = this.last - this.first, room = whole * 0.05;
    let width = Math.min(Math.max(high - low, LEAST_NS), whole + 2 * room);
    const middle = (low + high) / 2;
    low = Math.min(Math.max(middle - width / 2, this.first - room), this.last + room - width);
    [this.low, this.high] = [low, low + width];
    this.tip.hidden = true;
    this.redraw();
  }

  zoom(factor, around = (this.low + this.high) / 2) {
    this.look(around - (around - this.low) * factor, around + (this.high - around) * factor);
  }

  move(share) {
    const by = share * (this.high - this.low);
    this.look(this.low + by, this.high + by);
  }

  showAll() {
    const room = 0.01 * (this.last - this.first);
    this.look(this.first - room, this.last + room);
  }

  showStep(number) {
    const steps = this.parts[0].steps;
    if (!steps.length) return this.showAll();
    const [start, end] = steps[Math.min(Math.max(number, 0), steps.length - 1)];
    return this.look(start - 0.02 * (end - start), end + 0.02 * (end - start));
  }

  /** The number of the step of median duration. */
  get medianStep() {
    const longest = this.parts[0].steps.map(([start, end], number) => [end - start, number]).sort((a, b) => a[0] - b[0]);
    return longest.length ? longest[(longest.length - 1) >> 1][1] : 0;
  }

  /** The step in the middle of what is shown. */
  get nearestStep() {
    const middle = (this.low + this.high) / 2;
    const place = this.parts[0].steps.findIndex(([, end]) => end > middle);
    return place < 0 ? this.parts[0].steps.length - 1 : place;
  }

  // --- finding ---

  search(text) {
    const words = text.trim().toLowerCase();
    const output = document.getElementById("matches");
    this.found = words !== "" && this.lanes !== undefined;
    this.hits = new Hits([]);
    this.hit = -1;
    if (this.found) {
      const matching = new Map();
      for (const { capture } of this.parts) {
        const has = (text) => text.toLowerCase().includes(words);
        const those = (texts, fits) => new Set(texts.flatMap((one, code) => (fits(one, code) ? [code] : [])));
        // A kernel is found by its full name, and by the short one that is written on it.
        const names = those(capture.names, (name, code) => has(name) || has(capture.labels[code]));
        matching.set(capture, { names, modules: those(capture.modules, has) });
      }
      const some = [];
      for (const lane of this.lanes) {
        if (!lane.row) continue;
        const { names, modules } = matching.get(lane.capture);
        const { track, row } = lane;
        const byModule = track.module && modules.size;
        lane.fits = (one) => lane.kind !== "idle" && (names.has(track.name[one]) || (byModule && modules.has(track.module[one])));
        const places = [];
        for (let i = 0; i < row.index.length; i++) if (lane.fits(row.index[i])) places.push(i);
        lane.matches = new Float64Array(places.length);
        places.forEach((at, i) => (lane.matches[i] = (row.start[at] + row.end[at]) / 2));
        lane.matches.sort();
        if (places.length) some.push({ lane, places });
      }
      this.hits = new Hits(some);
    }
    output.textContent = !words ? "" : this.hits.length ? `${this.hits.length.toLocaleString("en")} found` : "nothing found";
    this.redraw();
  }

  stepThrough(by) {
    if (!this.hits.length) return;
    if (this.hit < 0) {
      // The first one that is shown, or behind what is shown.
      const from = this.hits.start.findIndex((start) => start >= this.low);
      this.hit = by > 0 ? (from < 0 ? 0 : from) : (from < 0 ? this.hits.length : from) - 1;
    } else {
      this.hit += by;
    }
    this.hit = (this.hit + this.hits.length) % this.hits.length;
    const { lane, position } = this.hits.at(this.hit);
    this.choose(lane, position);
    this.reveal(lane, position);
    document.getElementById("matches").textContent = `${(this.hit + 1).toLocaleString("en")} of ${this.hits.length.toLocaleString("en")}`;
  }

  /** Moves so that a box is seen, and zooms where it is too narrow or too wide. */
  reveal(lane, position) {
    const [start, end] = [lane.row.start[position], lane.row.end[position]];
    const shown = this.high - this.low, length = Math.max(end - start, 1);
    const width = length > shown * 0.9 || length < shown / 200 ? length * 20 : shown;
    const middle = (start + end) / 2;
    if (width !== shown || start < this.low || end > this.high) this.look(middle - width / 2, middle + width / 2);
    if (lane.top < this.scroll.scrollTop + HEAD || lane.top + lane.height > this.scroll.scrollTop + this.scroll.clientHeight) {
      this.scroll.scrollTop = lane.top - this.scroll.clientHeight / 2;
    }
  }

  /** What a finding is about: the longest box of it in the view of a capture or run. */
  async showFinding(kind, name, capture) {
    const views = this.shared.views;
    const number = views.findIndex((view) => (view.name ?? view.title) === capture);
    if (number < 0) return;
    if (this.shown !== number) await this.show(number);
    document.getElementById("find").value = "";
    this.search("");
    let best = null, longest = -1;
    for (const lane of this.lanes) {
      if (lane.kind !== (kind === "idle" ? "idle" : "stream")) continue;
      const { names, groups, phases } = lane.capture;
      const fits = {
        idle: (one) => groups[lane.track.group[one]] === name,
        class: (one) => groups[lane.track.group[one]] === name,
        phase: (one) => phases[lane.track.phase[one]] === name,
        kernel: (one) => names[lane.track.name[one]] === name,
      }[kind];
      for (let i = 0; i < lane.row.index.length; i++) {
        const length = lane.row.end[i] - lane.row.start[i];
        if (length > longest && fits(lane.row.index[i])) [best, longest] = [{ lane, position: i }, length];
      }
    }
    document.getElementById("timeline").scrollIntoView({ block: "start" });
    this.canvas.focus({ preventScroll: true });
    if (!best) {
      this.letGo();
      document.getElementById("chosen").replaceChildren(element("p", "Nothing of it is in what is shown here."));
      return;
    }
    this.choose(best.lane, best.position, { idle: `idle:${name}`, class: `stream:${name}` }[kind]);
    this.reveal(best.lane, best.position);
  }

  // --- choosing ---

  /** Lets go of what is chosen, marked and shown alone. */
  letGo() {
    this.chosen = this.marked = this.markFrom = null;
    document.getElementById("chosen").replaceChildren();
    this.showAlone(null);
  }

  /** Chooses a box, and says what is known of it; with a group its color is shown alone. */
  choose(lane, position, group = null) {
    this.chosen = { lane, position };
    this.marked = null;
    const rows = this.facts(lane, lane.row.index[position]);
    document.getElementById("chosen").replaceChildren(factTable(rows));
    this.showAlone(group);
  }

  /** What is known of a box: pairs of words. */
  facts(lane, one) {
    const { capture, track } = lane;
    const start = track.start[one], step = this.parts[lane.part].steps.findIndex(([from, until]) => start >= from && start < until);
    const facts = [];
    if (lane.kind === "idle") {
      const cause = capture.groups[track.group[one]];
      facts.push(["GPU idle", this.shared.causes[cause].text], ["the program was in", capture.names[track.name[one]] || "no range"]);
      const stack = capture.stacks[track.stack[one]], usual = capture.usual[`${cause} ${capture.names[track.name[one]]}`];
      stack.forEach((line, place) => facts.push([place ? "called from" : "the program was at", line]));
      if (!stack.length && usual) facts.push(["in most such gaps at", usual]);
    } else {
      facts.push(["name", capture.names[track.name[one]]]);
    }
    if (lane.kind === "stream") {
      facts.push(["class", capture.groups[track.group[one]]], ["phase", capture.phases[track.phase[one]] || "outside the phases"]);
      if (capture.modules[track.module[one]]) facts.push(["module", capture.modules[track.module[one]]]);
      if (lane.critical) facts.push(["on the critical path", lane.critical.index[countUntil(lane.critical.index, one) - 1] === one ? "yes" : "no"]);
      facts.push(["ranges", capture.paths[track.path[one]] || "none"]);
    }
    facts.push(["duration", inUnits(track.duration[one])]);
    facts.push(["start", `${inMs(start - this.parts[lane.part].start, 4)} ms${step < 0 ? "" : `, in step ${step + 1} of ${this.parts[lane.part].steps.length}`}`]);
    if (lane.kind === "stream" && !capture.on_cpu) facts.push(["launch latency", track.wait[one] < 0 ? "the launch is not known" : inUnits(track.wait[one])]);
    facts.push(["track", this.titleOf(lane)]);
    return facts;
  }

  titleOf(lane) {
    const place = this.lanes.indexOf(lane);
    const named = this.lanes.slice(0, place + 1).findLast((one) => one.title);
    const label = this.parts[lane.part].label;
    return label ? `${label}, ${named.title}` : named.title;
  }

  /** Sums a stretch up: the GPU's work by class and its idle time by cause, of each part of the view. */
  mark(one, other) {
    const [start, end] = one < other ? [one, other] : [other, one];
    this.marked = [start, end];
    this.chosen = null;
    const sums = new Map();
    let kernels = 0;
    for (const lane of this.lanes) {
      for (const [group, row] of lane.groups ?? []) {
        const ns = row.within(start, end);
        const count = countUntil(row.start, end) - countUntil(row.start, start);
        if (ns <= 0 && !count) continue;
        const name = lane.capture.groups[group];
        const text = lane.kind === "idle" ? `idle: ${this.shared.causes[name].text}` : name;
        if (!sums.has(text)) sums.set(text, { ns: 0, count: 0, parts: this.parts.map(() => 0) });
        const sum = sums.get(text);
        sum.ns += ns;
        sum.count += count;
        sum.parts[lane.part] += ns;
        if (lane.kind === "stream") kernels += count;
      }
    }
    const head = element("p", `${inUnits(end - start)} are marked; ${kernels.toLocaleString("en")} ${piecesOf(this.parts[0].capture)} begin in them.`);
    const table = element("table");
    const top = table.createTHead().insertRow();
    // Of several ranks the time of each: their sum is no share of a stretch.
    const several = this.parts.length > 1;
    const titles = several ? this.parts.map((part) => part.label) : ["time", "of the stretch", "count"];
    for (const title of ["class, or idle time by cause", ...titles]) top.append(element("th", title, { scope: "col" }));
    const body = table.createTBody();
    for (const [text, { ns, count, parts }] of [...sums].sort((a, b) => b[1].ns - a[1].ns)) {
      const cells = several ? parts.map(inUnits) : [inUnits(ns), `${((100 * ns) / (end - start)).toFixed(1)} %`, count.toLocaleString("en")];
      const row = body.insertRow();
      for (const cell of [text, ...cells]) row.append(element("td", cell));
    }
    document.getElementById("chosen").replaceChildren(head, table, ...this.memoryWithin(start, end));
    this.redraw();
  }

  /** What is said of the memory in a stretch, of each part that has it. */
  memoryWithin(start, end) {
    return this.lanes.filter((lane) => lane.kind === "memory").map((lane) => {
      const first = Math.max(countUntil(lane.time, start) - 1, 0), last = Math.max(countUntil(lane.time, end) - 1, first);
      const most = lane.bytes.subarray(first, last + 1).reduce((a, b) => Math.max(a, b));
      return element("p", `${this.titleOf(lane)}: ${inBytes(lane.bytes[first])} at the start, ${inBytes(most)} at most, ${inBytes(lane.bytes[last])} at the end.`);
    });
  }

  // --- mouse and keys ---

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.drag(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointercancel", () => (this.held = null));
    canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.timeAt(event.offsetX)));
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    this.scroll.addEventListener("scroll", () => this.redraw());
    new ResizeObserver(() => this.fit()).observe(this.scroll);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.fit());
    addEventListener("beforeprint", () => this.print());
    addEventListener("afterprint", () => this.printed());
    const on = (id, act) => document.getElementById(id).addEventListener("click", act);
    on("in", () => this.zoom(0.5));
    on("out", () => this.zoom(2));
    on("all", () => this.showAll());
    on("step", () => this.showStep(this.nearestStep));
    on("next", () => this.stepThrough(1));
    on("previous", () => this.stepThrough(-1));
    const find = document.getElementById("find");
    find.addEventListener("input", () => this.search(find.value));
    find.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.stepThrough(event.shiftKey ? -1 : 1);
    });
    const view = document.getElementById("view");
    this.shared.views.forEach((one, number) => view.append(element("option", one.title, { value: number })));
    document.getElementById("view-label").hidden = this.shared.views.length < 2;
    view.addEventListener("change", () => this.show(Number(view.value)));
  }

  laneAt(y) {
    return this.lanes.find((lane) => y >= lane.top - 1 && y < lane.top + lane.height);
  }

  /** The box under the pointer: in a lane without one there, none. */
  boxAt(event) {
    const lane = this.laneAt(event.offsetY + this.scroll.scrollTop);
    if (!lane?.row || event.offsetX < this.left) return null;
    const near = (NEAR * (this.high - this.low)) / (this.painter.width - this.left);
    const position = lane.at(this.timeAt(event.offsetX), near);
    return position < 0 ? null : { lane, position };
  }

  press(event) {
    if (event.button !== 0 || !this.lanes) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.held = { x: event.offsetX, y: event.offsetY, scrolled: this.scroll.scrollTop, low: this.low, high: this.high, moved: false, marks: event.shiftKey };
    this.tip.hidden = true;
  }

  drag(event) {
    if (!this.lanes) return;
    if (!this.held) {
      this.hover(event);
      return;
    }
    const { held } = this;
    const by = event.offsetX - held.x;
    held.moved ||= Math.abs(by) > CLICK || (!held.marks && Math.abs(event.offsetY - held.y) > CLICK);
    if (!held.moved) return;
    if (held.marks) {
      this.mark(this.timeAt(held.x), this.timeAt(event.offsetX));
    } else {
      const ns = (by * (held.high - held.low)) / (this.painter.width - this.left);
      this.look(held.low - ns, held.high - ns);
      this.scroll.scrollTop = held.scrolled + held.y - event.offsetY;
    }
  }

  release(event) {
    const { held } = this;
    this.held = null;
    if (!held || held.moved || !this.lanes) return;
    const box = this.boxAt(event);
    if (box) this.choose(box.lane, box.position);
    else this.letGo();
  }

  /** What is known of what is under the pointer; null where nothing is. */
  factsAt(event) {
    const box = this.boxAt(event);
    if (box) return this.facts(box.lane, box.lane.row.index[box.position]);
    const lane = this.laneAt(event.offsetY + this.scroll.scrollTop);
    if (!lane) return null;
    if (event.offsetX < this.left) return [["track", this.titleOf(lane)]]; // which may be longer than its place
    if (lane.kind !== "memory") return null;
    const time = this.timeAt(event.offsetX), bytes = lane.bytes[Math.max(countUntil(lane.time, time) - 1, 0)];
    return [["in use", inBytes(bytes)], ["moment", `${this.momentOf(time - this.parts[lane.part].start)} ms`], ["track", this.titleOf(lane)]];
  }

  hover(event) {
    const facts = this.factsAt(event);
    this.tip.hidden = !facts;
    if (!facts) return;
    this.tip.replaceChildren();
    facts.forEach(([what, said], place) => {
      const line = element("div");
      line.append(...(place ? [`${what}: ${said}`] : [element("b", said)]));
      this.tip.append(line);
    });
    const { width, height } = this.tip.getBoundingClientRect();
    this.tip.style.left = `${Math.min(event.clientX + 14, innerWidth - width - 8)}px`;
    this.tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
  }

  wheel(event) {
    if (!this.lanes) return;
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (sideways && (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))) {
      event.preventDefault();
      this.move(sideways / 1000);
    } else if (event.ctrlKey || event.metaKey || document.activeElement === this.canvas) {
      // Without a click first the wheel scrolls the page, as it does everywhere else on it.
      event.preventDefault();
      this.zoom(Math.exp(Math.min(Math.max(event.deltaY, -200), 200) / 300), this.timeAt(event.offsetX));
    }
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.lanes) return;
    const keys = {
      w: () => this.zoom(0.7), ArrowUp: () => this.zoom(0.7), s: () => this.zoom(1 / 0.7), ArrowDown: () => this.zoom(1 / 0.7),
      a: () => this.move(-0.15), ArrowLeft: () => this.move(-0.15), d: () => this.move(0.15), ArrowRight: () => this.move(0.15),
      ",": () => this.neighbor(-1), ".": () => this.neighbor(1), "[": () => this.otherLane(-1), "]": () => this.otherLane(1),
      f: () => this.fill(), 0: () => this.showAll(), Home: () => this.showStep(0), End: () => this.showStep(Infinity),
      "/": () => document.getElementById("find").focus(), n: () => this.stepThrough(1), p: () => this.stepThrough(-1),
      " ": () => this.markHere(), Escape: () => this.letGo(),
    };
    const act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  /** The next box of the lane; without a chosen one the one in the middle of the first lane with work. */
  neighbor(by) {
    if (!this.chosen) return this.otherLane(1);
    const { lane, position } = this.chosen;
    const next = Math.min(Math.max(position + by, 0), lane.row.start.length - 1);
    this.choose(lane, next);
    return this.reveal(lane, next);
  }

  otherLane(by) {
    const lanes = this.lanes.filter((lane) => lane.row?.start.length);
    const from = this.chosen ? lanes.indexOf(this.chosen.lane) : lanes.findIndex((lane) => lane.kind === "stream") - by;
    const lane = lanes[Math.min(Math.max(from + by, 0), lanes.length - 1)];
    const time = this.chosen ? this.chosen.lane.row.start[this.chosen.position] : (this.low + this.high) / 2;
    const position = Math.max(countUntil(lane.row.start, time) - 1, 0);
    this.choose(lane, position);
    this.reveal(lane, position);
  }

  fill() {
    if (this.marked) return this.look(...this.marked);
    if (!this.chosen) return undefined;
    const { lane, position } = this.chosen;
    const [start, end] = [lane.row.start[position], lane.row.end[position]];
    return this.look(start - 0.1 * (end - start), end + 0.1 * (end - start));
  }

  /** Begins a sum in the middle of what is shown, and ends it there. */
  markHere() {
    const middle = (this.low + this.high) / 2;
    if (this.markFrom === null) {
      this.markFrom = middle;
      this.chosen = null;
      this.marked = [middle, middle];
      document.getElementById("chosen").replaceChildren(element("p", "A stretch begins here: move, and press Space where it ends."));
      this.redraw();
    } else {
      this.mark(this.markFrom, middle);
      this.markFrom = null;
    }
  }
}

/** What was found in several lanes, in order of start: of millions, too, at each letter that is typed. */
class Hits {
  constructor(found) {
    this.lanes = found.map(({ lane }) => lane);
    this.length = found.reduce((sum, { places }) => sum + places.length, 0);
    this.start = new Float64Array(this.length);
    this.lane = new Uint16Array(this.length);
    this.position = new Int32Array(this.length);
    const taken = found.map(() => 0);
    const next = found.map(({ lane, places }) => lane.row.start[places[0]]);
    for (let i = 0; i < this.length; i++) {
      let first = 0;
      for (let one = 1; one < next.length; one++) if (next[one] < next[first]) first = one;
      const { lane, places } = found[first];
      [this.start[i], this.lane[i], this.position[i]] = [next[first], first, places[taken[first]++]];
      next[first] = taken[first] < places.length ? lane.row.start[places[taken[first]]] : Infinity;
    }
  }

  at(number) {
    return { lane: this.lanes[this.lane[number]], position: this.position[number] };
  }
}

function factTable(facts) {
  const table = element("table");
  for (const [what, said] of facts) {
    const row = table.insertRow();
    row.append(element("th", what, { scope: "row" }), element("td", said));
  }
  return table;
}
