// The interactive timeline: it shows views, moves, zooms, searches, selects boxes and sums up marked ranges.

/** Pixels: the width of lane titles, and the tolerances of a click and of the pointer; ns: the shortest view. */
const TITLES_WIDTH = 186, CLICK_TOLERANCE = 4, POINTER_TOLERANCE = 6, MIN_VIEW_NS = 20;
/** On paper: the width of the timeline in pixels, the dots per pixel, and the maximum height that a browser can draw. */
const PAPER = { width: 1000, dots: 2, height: 8000 };

class Timeline {
  constructor(shared, lines) {
    Object.assign(this, { shared, lines, captures: new Map(), left: TITLES_WIDTH, scrolled: 0 });
    this.canvas = document.getElementById("canvas");
    this.scroll = document.getElementById("scroll");
    this.painter = new Painter(this.canvas);
    this.tip = element("div", "", { id: "tip", role: "presentation" });
    this.tip.hidden = true;
    document.body.append(this.tip);
    this.isSearching = false;
    this.matches = new Matches([]);
    this.selection = this.markedRange = this.onlyGroup = null;
    this.listen();
  }

  /** Shows a view: a capture, or the ranks of a run below each other. */
  async show(number) {
    const view = this.shared.views[number];
    this.number = number;
    document.getElementById("view").value = String(number);
    for (const { capture } of view.parts) {
      if (!this.captures.has(capture)) this.captures.set(capture, await decodeLine(this.lines[capture]));
    }
    if (this.number !== number) return; // another view was selected in the meantime
    this.shownNumber = number;
    this.parts = [];
    this.lanes = [];
    let top = AXIS_HEIGHT;
    view.parts.forEach((part, place) => {
      const capture = this.captures.get(part.capture);
      const label = view.parts.length > 1 ? part.label : "";
      const partTop = top;
      top += label ? PART_TITLE_HEIGHT : LANE_GAP;
      for (const lane of makeLanes(capture, part.at, place)) {
        lane.capture = capture;
        if (lane.title && this.lanes.at(-1)?.part === place) top += LANE_GAP;
        lane.top = top;
        top += lane.height;
        this.lanes.push(lane);
      }
      const steps = capture.steps.map(([start, end]) => [start + part.at, end + part.at]);
      this.parts.push({ capture, label, top: partTop, bottom: top + LANE_GAP, steps, start: part.at, end: part.at + capture.duration });
      top += LANE_GAP;
    });
    this.height = top + 4;
    this.first = Math.min(...this.parts.map((part) => part.start));
    this.last = Math.max(...this.parts.map((part) => part.end));
    this.clearSelection();
    const notes = [...new Set(this.parts.map((part) => part.capture.left_out).filter(Boolean))];
    document.getElementById("note").textContent = [view.note, ...notes].filter(Boolean).join(" ");
    this.showLegend();
    this.search(document.getElementById("find").value);
    this.fit();
    this.showAll();
    this.showStep(this.medianStep);
    drawFlame(document.getElementById("flame"), this);
  }

  // --- drawing ---

  /** Resizes the canvas to the visible part of the lanes, since all lanes may be higher than any canvas. */
  fit() {
    if (!this.lanes || this.scroll.clientWidth <= TITLES_WIDTH || this.onPaper) return; // the timeline is hidden
    document.getElementById("lanes").style.height = `${this.height}px`;
    this.painter.readTheme();
    this.left = this.scroll.clientWidth < 700 ? 110 : TITLES_WIDTH;
    this.painter.resize(this.scroll.clientWidth, Math.min(this.height, this.scroll.clientHeight));
    this.requestDraw();
  }

  /** Draws all lanes in the colors for paper. It does so at once, since the browser prints immediately afterwards. */
  print() {
    if (!this.lanes) return;
    this.onPaper = true;
    document.documentElement.dataset.paper = "";
    this.painter.readTheme();
    [this.left, this.scrolled] = [TITLES_WIDTH, 0];
    this.painter.resize(PAPER.width, Math.min(this.height, PAPER.height), PAPER.dots);
    this.painter.draw(this);
  }

  endPrint() {
    delete document.documentElement.dataset.paper;
    this.onPaper = false;
    this.fit();
  }

  requestDraw() {
    if (this.drawRequested || !this.painter.width) return;
    this.drawRequested = true;
    requestAnimationFrame(() => {
      this.drawRequested = false;
      if (this.onPaper) return;
      this.scrolled = this.scroll.scrollTop;
      this.painter.draw(this);
      document.getElementById("visible-range").textContent = `${formatDuration(this.high - this.low)}, from ${this.formatTime(this.low - this.first)} ms`;
    });
  }

  /** Returns a time in ms, with the decimal places that the visible range needs. */
  formatTime(ns) {
    const digits = Math.min(Math.max(2 - Math.floor(Math.log10((this.high - this.low) / 1e6)), 0), 6);
    return formatMs(ns, digits).replace("-", "−");
  }

  textOf(lane, box) {
    if (lane.kind === "idle") return this.shared.causes[lane.capture.groups[lane.track.group[box]]].text;
    const name = lane.track.name[box];
    return lane.capture.labels[name] || lane.capture.names[name];
  }

  colorOfGroup(lane, group) {
    const name = lane.capture.groups[group];
    const classes = this.shared.classes;
    return lane.kind === "idle" ? this.shared.causes[name].color : (classes[name] ?? classes.other);
  }

  isDimmed(lane, box) {
    if (this.isSearching) return !lane.isMatch(box);
    return this.isGroupDimmed(lane, lane.track.group[box]);
  }

  isGroupDimmed(lane, group) {
    if (this.isSearching) return true;
    return this.onlyGroup !== null && this.onlyGroup !== `${lane.kind}:${lane.capture.groups[group]}`;
  }

  showLegend() {
    const sums = new Map();
    for (const lane of this.lanes) {
      for (const [group, row] of lane.groups ?? []) {
        const key = `${lane.kind}:${lane.capture.groups[group]}`;
        const sum = sums.get(key) ?? { ns: 0, color: this.colorOfGroup(lane, group), isIdle: lane.kind === "idle", name: lane.capture.groups[group] };
        sum.ns += row.covered.at(-1);
        sums.set(key, sum);
      }
    }
    const legend = document.getElementById("legend");
    legend.replaceChildren();
    const sorted = [...sums].sort((a, b) => a[1].isIdle - b[1].isIdle || b[1].ns - a[1].ns);
    for (const [key, { color, isIdle, name }] of sorted) {
      const patch = element("i");
      patch.style.background = color;
      const entry = element("button", "", { type: "button", "data-group": key, "aria-pressed": "false", title: "Show only this color" });
      entry.addEventListener("click", () => this.showOnly(this.onlyGroup === key ? null : key));
      entry.append(patch, isIdle ? `idle: ${this.shared.causes[name].text}` : name);
      legend.append(entry);
    }
    if (this.lanes.some((lane) => lane.critical)) {
      const entry = element("span", "", { class: "path", title: "The operations that determine the length of a step" });
      entry.append(element("i"), "on the critical path; where no operation is, the program is on it");
      legend.append(entry);
    }
  }

  /** Shows only one color of the legend, or all colors for null. */
  showOnly(group) {
    this.onlyGroup = group;
    for (const entry of document.querySelectorAll("#legend button")) entry.setAttribute("aria-pressed", String(entry.dataset.group === group));
    this.requestDraw();
  }

  // --- moving ---

  timeAt(x) {
    return this.low + ((x - this.left) * (this.high - this.low)) / (this.painter.width - this.left);
  }

  /** Shows a range of time, within the limits of the view. */
  setView(low, high) {
    const total = this.last - this.first, margin = total * 0.05;
    let width = Math.min(Math.max(high - low, MIN_VIEW_NS), total + 2 * margin);
    const middle = (low + high) / 2;
    low = Math.min(Math.max(middle - width / 2, this.first - margin), this.last + margin - width);
    [this.low, this.high] = [low, low + width];
    this.tip.hidden = true;
    this.requestDraw();
  }

  zoom(factor, around = (this.low + this.high) / 2) {
    this.setView(around - (around - this.low) * factor, around + (this.high - around) * factor);
  }

  move(share) {
    const by = share * (this.high - this.low);
    this.setView(this.low + by, this.high + by);
  }

  showAll() {
    const margin = 0.01 * (this.last - this.first);
    this.setView(this.first - margin, this.last + margin);
  }

  showStep(number) {
    const steps = this.parts[0].steps;
    if (!steps.length) return this.showAll();
    const [start, end] = steps[Math.min(Math.max(number, 0), steps.length - 1)];
    return this.setView(start - 0.02 * (end - start), end + 0.02 * (end - start));
  }

  /** The index of the step of median duration. */
  get medianStep() {
    const byDuration = this.parts[0].steps.map(([start, end], number) => [end - start, number]).sort((a, b) => a[0] - b[0]);
    return byDuration.length ? byDuration[(byDuration.length - 1) >> 1][1] : 0;
  }

  /** The index of the step in the middle of the visible range. */
  get nearestStep() {
    const middle = (this.low + this.high) / 2;
    const place = this.parts[0].steps.findIndex(([, end]) => end > middle);
    return place < 0 ? this.parts[0].steps.length - 1 : place;
  }

  // --- searching ---

  search(text) {
    const words = text.trim().toLowerCase();
    const output = document.getElementById("matches");
    this.isSearching = words !== "" && this.lanes !== undefined;
    this.matches = new Matches([]);
    this.matchNumber = -1;
    if (this.isSearching) {
      const matching = new Map();
      for (const { capture } of this.parts) {
        const contains = (text) => text.toLowerCase().includes(words);
        const codesOf = (texts, isMatch) => new Set(texts.flatMap((text, code) => (isMatch(text, code) ? [code] : [])));
        // A kernel is found by its full name and by its label.
        const names = codesOf(capture.names, (name, code) => contains(name) || contains(capture.labels[code]));
        matching.set(capture, { names, modules: codesOf(capture.modules, contains) });
      }
      const laneMatches = [];
      for (const lane of this.lanes) {
        if (!lane.row) continue;
        const { names, modules } = matching.get(lane.capture);
        const { track, row } = lane;
        const byModule = track.module && modules.size;
        lane.isMatch = (box) => lane.kind !== "idle" && (names.has(track.name[box]) || (byModule && modules.has(track.module[box])));
        const positions = [];
        for (let i = 0; i < row.index.length; i++) if (lane.isMatch(row.index[i])) positions.push(i);
        lane.matches = new Float64Array(positions.length);
        positions.forEach((position, i) => (lane.matches[i] = (row.start[position] + row.end[position]) / 2));
        lane.matches.sort();
        if (positions.length) laneMatches.push({ lane, positions });
      }
      this.matches = new Matches(laneMatches);
    }
    output.textContent = !words ? "" : this.matches.length ? `${this.matches.length.toLocaleString("en")} found` : "no match";
    this.requestDraw();
  }

  goToMatch(by) {
    if (!this.matches.length) return;
    if (this.matchNumber < 0) {
      // The first match in or after the visible range.
      const first = this.matches.start.findIndex((start) => start >= this.low);
      this.matchNumber = by > 0 ? Math.max(first, 0) : (first < 0 ? this.matches.length : first) - 1;
    } else {
      this.matchNumber += by;
    }
    this.matchNumber = (this.matchNumber + this.matches.length) % this.matches.length;
    const { lane, position } = this.matches.at(this.matchNumber);
    this.select(lane, position);
    this.reveal(lane, position);
    document.getElementById("matches").textContent = `${(this.matchNumber + 1).toLocaleString("en")} of ${this.matches.length.toLocaleString("en")}`;
  }

  /** Moves the view to a box, and zooms if the box is too narrow or too wide. */
  reveal(lane, position) {
    const [start, end] = [lane.row.start[position], lane.row.end[position]];
    const visible = this.high - this.low, length = Math.max(end - start, 1);
    const width = length > visible * 0.9 || length < visible / 200 ? length * 20 : visible;
    const middle = (start + end) / 2;
    if (width !== visible || start < this.low || end > this.high) this.setView(middle - width / 2, middle + width / 2);
    if (lane.top < this.scroll.scrollTop + AXIS_HEIGHT || lane.top + lane.height > this.scroll.scrollTop + this.scroll.clientHeight) {
      this.scroll.scrollTop = lane.top - this.scroll.clientHeight / 2;
    }
  }

  /** Shows the longest box that a finding is about, in the view of a capture or run. */
  async showFinding(kind, name, capture) {
    const views = this.shared.views;
    const number = views.findIndex((view) => (view.name ?? view.title) === capture);
    if (number < 0) return;
    if (this.shownNumber !== number) await this.show(number);
    document.getElementById("find").value = "";
    this.search("");
    let best = null, longest = -1;
    for (const lane of this.lanes) {
      if (lane.kind !== (kind === "idle" ? "idle" : "stream")) continue;
      const { names, groups, phases } = lane.capture;
      const isSubject = {
        idle: (box) => groups[lane.track.group[box]] === name,
        class: (box) => groups[lane.track.group[box]] === name,
        phase: (box) => phases[lane.track.phase[box]] === name,
        kernel: (box) => names[lane.track.name[box]] === name,
      }[kind];
      for (let i = 0; i < lane.row.index.length; i++) {
        const length = lane.row.end[i] - lane.row.start[i];
        if (length > longest && isSubject(lane.row.index[i])) [best, longest] = [{ lane, position: i }, length];
      }
    }
    document.getElementById("timeline").scrollIntoView({ block: "start" });
    this.canvas.focus({ preventScroll: true });
    if (!best) {
      this.clearSelection();
      document.getElementById("selection").replaceChildren(element("p", "The timeline shows no part of this finding."));
      return;
    }
    this.select(best.lane, best.position, { idle: `idle:${name}`, class: `stream:${name}` }[kind]);
    this.reveal(best.lane, best.position);
  }

  // --- selecting ---

  /** Clears the selection and the marked range, and shows all colors. */
  clearSelection() {
    this.selection = this.markedRange = this.markStart = null;
    document.getElementById("selection").replaceChildren();
    this.showOnly(null);
  }

  /** Selects a box and describes it; with a group, shows only the color of that group. */
  select(lane, position, group = null) {
    this.selection = { lane, position };
    this.markedRange = null;
    const rows = this.describe(lane, lane.row.index[position]);
    document.getElementById("selection").replaceChildren(makeTable(rows));
    this.showOnly(group);
  }

  /** Returns the properties of a box as pairs of a name and a value. */
  describe(lane, box) {
    const { capture, track } = lane;
    const { steps, start: origin } = this.parts[lane.part];
    const start = track.start[box], step = steps.findIndex(([from, until]) => start >= from && start < until);
    const properties = [];
    if (lane.kind === "idle") {
      const cause = capture.groups[track.group[box]];
      properties.push(["GPU idle", this.shared.causes[cause].text], ["range of the program", capture.names[track.name[box]] || "no range"]);
      const stack = capture.stacks[track.stack[box]], usual = capture.usual[`${cause} ${capture.names[track.name[box]]}`];
      stack.forEach((line, depth) => properties.push([depth ? "called from" : "line of the program", line]));
      if (!stack.length && usual) properties.push(["line in most such gaps", usual]);
    } else {
      properties.push(["name", capture.names[track.name[box]]]);
    }
    if (lane.kind === "stream") {
      properties.push(["class", capture.groups[track.group[box]]], ["phase", capture.phases[track.phase[box]] || "outside the phases"]);
      if (capture.modules[track.module[box]]) properties.push(["module", capture.modules[track.module[box]]]);
      const operator = track.operator && capture.operators[track.operator[box]];
      if (operator) {
        const [name, shapes, line, attainable] = operator;
        properties.push(["operator", `${name} ${shapes}`]);
        if (line) properties.push(["line", line]);
        properties.push(["attainable time of the operator", attainable === null ? "unknown" : formatDuration(attainable)]);
      }
      if (lane.critical) properties.push(["on the critical path", lane.critical.index[countUntil(lane.critical.index, box) - 1] === box ? "yes" : "no"]);
      properties.push(["ranges", capture.paths[track.path[box]] || "none"]);
    }
    properties.push(["duration", formatDuration(track.duration[box])]);
    properties.push(["start", `${formatMs(start - origin, 4)} ms${step < 0 ? "" : `, in step ${step + 1} of ${steps.length}`}`]);
    if (lane.kind === "stream" && !capture.on_cpu) properties.push(["launch latency", track.wait[box] < 0 ? "unknown" : formatDuration(track.wait[box])]);
    properties.push(["track", this.titleOf(lane)]);
    return properties;
  }

  titleOf(lane) {
    const place = this.lanes.indexOf(lane);
    const titled = this.lanes.slice(0, place + 1).findLast((candidate) => candidate.title);
    const label = this.parts[lane.part].label;
    return label ? `${label}, ${titled.title}` : titled.title;
  }

  /** Marks a range, and sums up the GPU's work by class and its idle time by cause, for each part of the view. */
  markRange(first, second) {
    const [start, end] = first < second ? [first, second] : [second, first];
    this.markedRange = [start, end];
    this.selection = null;
    const sums = new Map();
    let started = 0;
    for (const lane of this.lanes) {
      for (const [group, row] of lane.groups ?? []) {
        const ns = row.coveredBetween(start, end);
        const count = countUntil(row.start, end) - countUntil(row.start, start);
        if (ns <= 0 && !count) continue;
        const name = lane.capture.groups[group];
        const text = lane.kind === "idle" ? `idle: ${this.shared.causes[name].text}` : name;
        if (!sums.has(text)) sums.set(text, { ns: 0, count: 0, parts: this.parts.map(() => 0) });
        const sum = sums.get(text);
        sum.ns += ns;
        sum.count += count;
        sum.parts[lane.part] += ns;
        if (lane.kind === "stream") started += count;
      }
    }
    const head = element("p", `The marked range lasts ${formatDuration(end - start)}; ${started.toLocaleString("en")} ${operationNoun(this.parts[0].capture)} start in it.`);
    const table = element("table");
    const top = table.createTHead().insertRow();
    // For several ranks, the time of each is shown, since the sum is no share of the range.
    const hasSeveralParts = this.parts.length > 1;
    const titles = hasSeveralParts ? this.parts.map((part) => part.label) : ["time", "share of the range", "count"];
    for (const title of ["class, or idle time by cause", ...titles]) top.append(element("th", title, { scope: "col" }));
    const body = table.createTBody();
    for (const [text, { ns, count, parts }] of [...sums].sort((a, b) => b[1].ns - a[1].ns)) {
      const cells = hasSeveralParts ? parts.map(formatDuration) : [formatDuration(ns), `${((100 * ns) / (end - start)).toFixed(1)} %`, count.toLocaleString("en")];
      const row = body.insertRow();
      for (const cell of [text, ...cells]) row.append(element("td", cell));
    }
    document.getElementById("selection").replaceChildren(head, table, ...this.describeMemory(start, end));
    this.requestDraw();
  }

  /** Describes memory and counters in a range, for each part in which they were recorded. */
  describeMemory(start, end) {
    return this.lanes.filter((lane) => lane.values).map((lane) => {
      const first = Math.max(countUntil(lane.time, start) - 1, 0), last = Math.max(countUntil(lane.time, end) - 1, first);
      const most = lane.values.subarray(first, last + 1).reduce((a, b) => Math.max(a, b));
      return element("p", `${this.titleOf(lane)}: ${lane.format(lane.values[first])} at the start, ${lane.format(most)} at the peak, ${lane.format(lane.values[last])} at the end.`);
    });
  }

  // --- mouse and keys ---

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.drag(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointercancel", () => (this.pressed = null));
    canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.timeAt(event.offsetX)));
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    this.scroll.addEventListener("scroll", () => this.requestDraw());
    new ResizeObserver(() => this.fit()).observe(this.scroll);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.fit());
    addEventListener("beforeprint", () => this.print());
    addEventListener("afterprint", () => this.endPrint());
    const on = (id, action) => document.getElementById(id).addEventListener("click", action);
    on("in", () => this.zoom(0.5));
    on("out", () => this.zoom(2));
    on("all", () => this.showAll());
    on("step", () => this.showStep(this.nearestStep));
    on("next", () => this.goToMatch(1));
    on("previous", () => this.goToMatch(-1));
    const find = document.getElementById("find");
    find.addEventListener("input", () => this.search(find.value));
    find.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.goToMatch(event.shiftKey ? -1 : 1);
    });
    const view = document.getElementById("view");
    this.shared.views.forEach(({ title }, number) => view.append(element("option", title, { value: number })));
    document.getElementById("view-label").hidden = this.shared.views.length < 2;
    view.addEventListener("change", () => this.show(Number(view.value)));
  }

  laneAt(y) {
    return this.lanes.find((lane) => y >= lane.top - 1 && y < lane.top + lane.height);
  }

  /** Returns the box under the pointer, or null. */
  boxAt(event) {
    const lane = this.laneAt(event.offsetY + this.scroll.scrollTop);
    if (!lane?.row || event.offsetX < this.left) return null;
    const tolerance = (POINTER_TOLERANCE * (this.high - this.low)) / (this.painter.width - this.left);
    const position = lane.findBox(this.timeAt(event.offsetX), tolerance);
    return position < 0 ? null : { lane, position };
  }

  press(event) {
    if (event.button !== 0 || !this.lanes) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.pressed = { x: event.offsetX, y: event.offsetY, scrolled: this.scroll.scrollTop, low: this.low, high: this.high, moved: false, marks: event.shiftKey };
    this.tip.hidden = true;
  }

  drag(event) {
    if (!this.lanes) return;
    if (!this.pressed) {
      this.hover(event);
      return;
    }
    const { pressed } = this;
    const distance = event.offsetX - pressed.x;
    pressed.moved ||= Math.abs(distance) > CLICK_TOLERANCE || (!pressed.marks && Math.abs(event.offsetY - pressed.y) > CLICK_TOLERANCE);
    if (!pressed.moved) return;
    if (pressed.marks) {
      this.markRange(this.timeAt(pressed.x), this.timeAt(event.offsetX));
    } else {
      const ns = (distance * (pressed.high - pressed.low)) / (this.painter.width - this.left);
      this.setView(pressed.low - ns, pressed.high - ns);
      this.scroll.scrollTop = pressed.scrolled + pressed.y - event.offsetY;
    }
  }

  release(event) {
    const { pressed } = this;
    this.pressed = null;
    if (!pressed || pressed.moved || !this.lanes) return;
    const box = this.boxAt(event);
    if (box) this.select(box.lane, box.position);
    else this.clearSelection();
  }

  /** Returns the properties of the lane or box under the pointer, or null. */
  describeAt(event) {
    const box = this.boxAt(event);
    if (box) return this.describe(box.lane, box.lane.row.index[box.position]);
    const lane = this.laneAt(event.offsetY + this.scroll.scrollTop);
    if (!lane) return null;
    if (event.offsetX < this.left) return [["track", this.titleOf(lane)]]; // a long title is cut in its place
    if (!lane.values) return null;
    const time = this.timeAt(event.offsetX), value = lane.values[Math.max(countUntil(lane.time, time) - 1, 0)];
    return [[lane.kind === "memory" ? "in use" : "value", lane.format(value)], ["time", `${this.formatTime(time - this.parts[lane.part].start)} ms`], ["track", this.titleOf(lane)]];
  }

  hover(event) {
    const properties = this.describeAt(event);
    this.tip.hidden = !properties;
    if (!properties) return;
    this.tip.replaceChildren();
    properties.forEach(([name, value], row) => {
      const line = element("div");
      line.append(...(row ? [`${name}: ${value}`] : [element("b", value)]));
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
      // Before a click on the timeline, the wheel scrolls the page, as elsewhere on it.
      event.preventDefault();
      this.zoom(Math.exp(Math.min(Math.max(event.deltaY, -200), 200) / 300), this.timeAt(event.offsetX));
    }
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.lanes) return;
    const keys = {
      w: () => this.zoom(0.7), ArrowUp: () => this.zoom(0.7), s: () => this.zoom(1 / 0.7), ArrowDown: () => this.zoom(1 / 0.7),
      a: () => this.move(-0.15), ArrowLeft: () => this.move(-0.15), d: () => this.move(0.15), ArrowRight: () => this.move(0.15),
      ",": () => this.selectNeighbor(-1), ".": () => this.selectNeighbor(1), "[": () => this.selectInLane(-1), "]": () => this.selectInLane(1),
      f: () => this.zoomToSelection(), 0: () => this.showAll(), Home: () => this.showStep(0), End: () => this.showStep(Infinity),
      "/": () => document.getElementById("find").focus(), n: () => this.goToMatch(1), p: () => this.goToMatch(-1),
      " ": () => this.markMiddle(), Escape: () => this.clearSelection(),
    };
    const action = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  /** Selects the next box of the lane, or the box in the middle of the first lane with work if none is selected. */
  selectNeighbor(by) {
    if (!this.selection) return this.selectInLane(1);
    const { lane, position } = this.selection;
    const next = Math.min(Math.max(position + by, 0), lane.row.start.length - 1);
    this.select(lane, next);
    return this.reveal(lane, next);
  }

  /** Selects the box at the same time in the next lane. */
  selectInLane(by) {
    const lanes = this.lanes.filter((lane) => lane.row?.start.length);
    const from = this.selection ? lanes.indexOf(this.selection.lane) : lanes.findIndex((lane) => lane.kind === "stream") - by;
    const lane = lanes[Math.min(Math.max(from + by, 0), lanes.length - 1)];
    const time = this.selection ? this.selection.lane.row.start[this.selection.position] : (this.low + this.high) / 2;
    const position = Math.max(countUntil(lane.row.start, time) - 1, 0);
    this.select(lane, position);
    this.reveal(lane, position);
  }

  /** Fills the view with the marked range or the selected box. */
  zoomToSelection() {
    if (this.markedRange) return this.setView(...this.markedRange);
    if (!this.selection) return undefined;
    const { lane, position } = this.selection;
    const [start, end] = [lane.row.start[position], lane.row.end[position]];
    return this.setView(start - 0.1 * (end - start), end + 0.1 * (end - start));
  }

  /** Starts a marked range in the middle of the visible range, or ends it there. */
  markMiddle() {
    const middle = (this.low + this.high) / 2;
    if (this.markStart === null) {
      this.markStart = middle;
      this.selection = null;
      this.markedRange = [middle, middle];
      document.getElementById("selection").replaceChildren(element("p", "The marked range starts here. Move, and press Space to end it."));
      this.requestDraw();
    } else {
      this.markRange(this.markStart, middle);
      this.markStart = null;
    }
  }
}

/** The matches of several lanes in order of start. It is fast enough for millions of matches at each typed letter. */
class Matches {
  constructor(laneMatches) {
    this.lanes = laneMatches.map(({ lane }) => lane);
    this.length = laneMatches.reduce((sum, { positions }) => sum + positions.length, 0);
    this.start = new Float64Array(this.length);
    this.lane = new Uint16Array(this.length);
    this.position = new Int32Array(this.length);
    const merged = laneMatches.map(() => 0);
    const nextStart = laneMatches.map(({ lane, positions }) => lane.row.start[positions[0]]);
    for (let i = 0; i < this.length; i++) {
      let first = 0;
      for (let k = 1; k < nextStart.length; k++) if (nextStart[k] < nextStart[first]) first = k;
      const { lane, positions } = laneMatches[first];
      [this.start[i], this.lane[i], this.position[i]] = [nextStart[first], first, positions[merged[first]++]];
      nextStart[first] = merged[first] < positions.length ? lane.row.start[positions[merged[first]]] : Infinity;
    }
  }

  at(number) {
    return { lane: this.lanes[this.lane[number]], position: this.position[number] };
  }
}

/** Returns a table of the properties of a box. */
function makeTable(properties) {
  const table = element("table");
  for (const [name, value] of properties) {
    const row = table.insertRow();
    row.append(element("th", name, { scope: "row" }), element("td", value));
  }
  return table;
}
