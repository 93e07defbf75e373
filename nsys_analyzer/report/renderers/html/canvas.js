// The timeline as data: lanes of boxes over one axis in nanoseconds, and how each is drawn.

const HEIGHTS = { ranges: 20, calls: 20, lines: 20, stream: 64, idle: 26, memory: 48 };
const BETWEEN = 6, HEAD = 22, PART = 22;

/** Where a time stands among sorted ones: how many are not behind it. */
function countUntil(sorted, time, low = 0, high = sorted.length) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= time) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Boxes in order of start: their starts and ends, and the number that each has in its track. */
class Row {
  constructor(track, index) {
    const { length } = index;
    this.index = index;
    this.start = new Float64Array(length);
    this.end = new Float64Array(length);
    this.covered = new Float64Array(length + 1);
    // The latest end until each box: kernels of one stream overlap where one lets the next begin early.
    this.reach = new Float64Array(length);
    // A loop, since Float64Array.from with a function takes ten times as long.
    for (let i = 0; i < length; i++) {
      this.start[i] = track.start[index[i]];
      this.end[i] = this.start[i] + track.duration[index[i]];
      this.covered[i + 1] = this.covered[i] + this.end[i] - this.start[i];
      this.reach[i] = i ? Math.max(this.end[i], this.reach[i - 1]) : this.end[i];
    }
  }

  /** The time of all boxes before a moment, at which a number of them has begun. */
  until(time, begun) {
    let sum = this.covered[begun];
    for (let i = begun - 1; i >= 0 && this.reach[i] > time; i--) sum -= Math.max(this.end[i] - time, 0);
    return sum;
  }

  before(time, low = 0) {
    return this.until(time, countUntil(this.start, time, low));
  }

  within(start, end) {
    return this.before(end) - this.before(start);
  }
}

/** One track of a capture as a lane, or the boxes of one depth of a thread's ranges. */
class Lane {
  constructor(title, kind, track, part, index) {
    Object.assign(this, { title, kind, track, part, height: HEIGHTS[kind] });
    this.row = new Row(track, index);
    this.longest = 0;
    for (let i = 0; i < index.length; i++) this.longest = Math.max(this.longest, this.row.end[i] - this.row.start[i]);
    this.groups = new Map();
    if (kind === "stream" || kind === "idle") {
      const members = new Map();
      for (const i of index) {
        const group = track.group[i];
        if (!members.has(group)) members.set(group, []);
        members.get(group).push(i);
      }
      const all = [...members].map(([group, some]) => [group, new Row(track, Int32Array.from(some))]);
      all.sort((a, b) => b[1].covered.at(-1) - a[1].covered.at(-1));
      this.groups = new Map(all);
    }
  }

  /** The first position whose box may still be open at a moment. */
  first(time) {
    let at = countUntil(this.row.start, time - this.longest);
    while (at < this.row.start.length && this.row.end[at] < time) at++;
    return at;
  }

  /** The position of the box at a moment, or the nearest one within a distance; -1 for none. */
  at(time, near = 0) {
    const { start, end } = this.row;
    let best = -1, distance = near;
    for (let i = countUntil(start, time + near) - 1; i >= 0 && start[i] > time - near - this.longest; i--) {
      const away = time < start[i] ? start[i] - time : time > end[i] ? time - end[i] : 0;
      if (away === 0) return i;
      if (away <= distance) [best, distance] = [i, away];
    }
    return best;
  }
}

/** Sums of small differences, as the page's data holds them. */
function summed(differences) {
  const values = new Float64Array(differences.length);
  let sum = 0;
  for (let i = 0; i < values.length; i++) values[i] = sum += differences[i];
  return values;
}

/** The lanes of one capture, whose moment 0 lies at `at` on the view's axis. */
function lanesOf(capture, at, number) {
  const lanes = [];
  const threads = [];
  const addMemory = () => {
    if (!capture.memory.time.length) return;
    const time = summed(capture.memory.time).map((one) => one + at);
    lanes.push({ title: "Device memory", kind: "memory", part: number, height: HEIGHTS.memory, time, bytes: summed(capture.memory.bytes) });
  };
  // The memory stands below the device's own tracks, before those of threads that launch nothing.
  const last = capture.tracks.findLastIndex((track) => track.kind === "stream" || track.kind === "idle");
  if (last < 0) addMemory();
  capture.tracks.forEach((track, place) => {
    const start = summed(track.start);
    for (let i = 0; i < start.length; i++) start[i] += at;
    const shown = { ...track, start, duration: Float64Array.from(track.duration) };
    const nested = ["ranges", "calls", "lines"].includes(track.kind);
    const depths = nested ? 1 + track.depth.reduce((a, b) => Math.max(a, b), 0) : 1;
    const members = Array.from({ length: depths }, () => []);
    for (let i = 0; i < start.length; i++) members[nested ? track.depth[i] : 0].push(i);
    members.forEach((index, depth) => {
      const lane = new Lane(depth ? "" : track.title, track.kind, shown, number, Int32Array.from(index));
      if (track.critical) lane.critical = new Row(shown, Int32Array.from(summed(track.critical)));
      if (track.kind === "ranges" && !depth) threads.push(lane);
      lanes.push(lane);
    });
    if (place === last) addMemory();
  });
  for (const lane of lanes) lane.threads = threads;
  return lanes;
}

/** What the boxes of a capture's streams are called. */
function piecesOf(capture) {
  return capture.on_cpu ? "operators" : "kernels and copies";
}

/** Unpacks a line of the page's data. */
async function unpacked(line) {
  const text = atob(line);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

function inUnits(ns) {
  const size = Math.abs(ns);
  if (size >= 1e9) return `${Number((ns / 1e9).toPrecision(4)).toLocaleString("en")} s`;
  if (size >= 1e6) return `${Number((ns / 1e6).toPrecision(4)).toLocaleString("en")} ms`;
  if (size >= 1e3) return `${(ns / 1e3).toPrecision(4)} µs`;
  return `${Math.round(ns)} ns`;
}

/** A time in ms with so many digits behind the point. */
function inMs(ns, digits) {
  return (ns / 1e6).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits, signDisplay: "negative" });
}

function inBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (Math.abs(bytes) >= 1024 && power < units.length - 1) [bytes, power] = [bytes / 1024, power + 1];
  return `${bytes.toFixed(power ? 1 : 0)} ${units[power]}`;
}

/** Draws lanes onto a canvas: what is asked for changes from frame to frame, what it is drawn with does not. */
class Painter {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
  }

  /** Reads the colors of the page, which follow the system's wish. */
  restyle() {
    const style = getComputedStyle(document.documentElement);
    const names = ["page", "panel", "line", "ink", "faint", "track", "box", "box-edge", "box-ink", "accent", "found"];
    this.theme = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  }

  resize(width, height, scale = devicePixelRatio || 1) {
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      this.canvas.style.height = `${height}px`;
    }
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    [this.width, this.height] = [width, height];
  }

  /** Draws one frame; `view` holds the stretch, the lanes with their tops, how far they are scrolled, and what is found and chosen. */
  draw(view) {
    const { context, theme } = this;
    Object.assign(this, { low: view.low, high: view.high, left: view.left });
    this.scale = (this.width - view.left) / (view.high - view.low);
    context.font = this.font;
    const ticks = this.ticks(view);
    context.textBaseline = "middle";
    this.fill(theme.page, 0, 0, this.width, this.height);
    context.save();
    context.translate(0, -view.scrolled);
    context.save();
    context.beginPath();
    context.rect(view.left, view.scrolled, this.width - view.left, this.height);
    context.clip();
    this.drawSteps(view);
    this.drawGrid(view, ticks);
    for (const lane of view.lanes) {
      if (lane.top + lane.height > view.scrolled && lane.top < view.scrolled + this.height) this.drawLane(lane, view);
    }
    if (view.marked) this.drawMarked(view);
    if (view.chosen) this.drawChosen(view);
    context.restore();
    this.drawTitles(view);
    this.drawAxis(view, ticks);
    context.restore();
  }

  fill(color, x, y, wide, high) {
    this.context.fillStyle = color;
    this.context.fillRect(x, y, wide, high);
  }

  x(time) {
    return this.left + (time - this.low) * this.scale;
  }

  /** Left edge and width of a stretch, cut a little outside the view: of what reaches far beyond it a canvas knows the edges no more. */
  across(start, end) {
    const x = Math.max(this.x(start), this.left - 4);
    return [x, Math.min(this.x(end), this.width + 4) - x];
  }

  drawSteps(view) {
    const { theme } = this;
    for (const part of view.parts) {
      for (const [start, end] of part.steps.filter((_, number) => number % 2 === 0)) {
        if (end <= this.low || start >= this.high) continue;
        const [x, wide] = this.across(start, end);
        this.fill(theme.panel, x, part.top, wide, part.bottom - part.top);
      }
    }
  }

  /** A line down from each tick of the axis, so that what stands far below it can be read on it. */
  drawGrid(view, { at }) {
    const { theme } = this;
    for (const tick of at) this.fill(theme.line, this.x(tick), view.scrolled, 1, this.height);
  }

  drawLane(lane, view) {
    if (lane.kind === "memory") this.drawMemory(lane);
    else if (lane.kind === "stream" || lane.kind === "idle") this.drawWork(lane, view);
    else this.drawBoxes(lane, view);
    if (lane.critical) this.drawCritical(lane);
    if (view.found) this.drawFound(lane, view);
  }

  /** Ranges and calls: boxes with their names; of what is narrower than a pixel one box a pixel. */
  drawBoxes(lane, view) {
    const { context, theme } = this;
    const { start, end, index } = lane.row;
    const height = lane.height - 2;
    let drawn = -Infinity;
    for (let i = lane.first(this.low); i < start.length && start[i] < this.high; ) {
      const x = Math.max(this.x(start[i]), this.left - 2);
      const wide = Math.min(this.x(end[i]), this.width + 2) - x;
      if (wide >= 1) {
        context.globalAlpha = view.found && !lane.fits(index[i]) ? 0.35 : 1;
        this.fill(theme.box, x, lane.top, wide, height);
        if (wide > 3) {
          this.fill(theme["box-edge"], x, lane.top, 1, height);
          this.fill(theme["box-edge"], x, lane.top, wide, 1);
        }
        if (wide > 24) this.write(view.textOf(lane, index[i]), x + 4, lane.top + height / 2 + 0.5, wide - 8, theme["box-ink"]);
        context.globalAlpha = 1;
        i++;
      } else {
        if (x >= drawn + 1) {
          this.fill(theme["box-edge"], x, lane.top, 1, height);
          drawn = Math.floor(x);
        }
        // The last box that begins in this pixel, which alone may reach beyond it.
        i = Math.max(i + 1, countUntil(start, this.low + (Math.floor(x) + 1 - this.left) / this.scale, i) - 1);
      }
    }
  }

  /** Work and idle time: boxes while there is room for them, else in each pixel the share of each color. */
  drawWork(lane, view) {
    const { context, theme } = this;
    this.fill(theme.track, this.left, lane.top, this.width - this.left, lane.height - 2);
    const first = lane.first(this.low), last = countUntil(lane.row.start, this.high);
    if (last - first > (this.width - this.left) / 2) return this.drawShares(lane, view);
    const { start, end, index } = lane.row;
    const height = lane.height - 2;
    for (let i = first; i < last; i++) {
      const one = index[i], [x, shown] = this.across(start[i], end[i]), wide = Math.max(shown, 0.7);
      context.globalAlpha = view.isFaint(lane, one) ? 0.25 : 1;
      this.fill(view.colorOfGroup(lane, lane.track.group[one]), x, lane.top, wide, height);
      if (wide > 34) {
        const from = Math.max(x, this.left);
        this.write(view.textOf(lane, one), from + 4, lane.top + height / 2, Math.min(x + wide, this.width) - from - 8, inkOn(context.fillStyle));
      }
    }
    context.globalAlpha = 1;
    return undefined;
  }

  drawShares(lane, view) {
    const { context } = this;
    const columns = Math.ceil(this.width - this.left), ns = 1 / this.scale, height = lane.height - 2;
    const bottom = new Float64Array(columns).fill(lane.top + height);
    for (const [group, row] of lane.groups) {
      context.fillStyle = view.colorOfGroup(lane, group);
      context.globalAlpha = view.isFaintGroup(lane, group) ? 0.25 : 1;
      let at = countUntil(row.start, this.low);
      let before = row.before(this.low, Math.max(at - 1, 0));
      for (let column = 0; column < columns; column++) {
        const time = this.low + (column + 1) * ns;
        at = galloped(row.start, time, at);
        const until = row.until(time, at);
        if (until > before) {
          const high = Math.min((until - before) / ns, 1) * height;
          const top = Math.max(bottom[column] - high, lane.top);
          context.fillRect(this.left + column, top, 1, bottom[column] - top);
          bottom[column] = top;
        }
        before = until;
      }
    }
    context.globalAlpha = 1;
  }

  /** A bar below what is on the critical path; of what is narrower than a pixel one a pixel. */
  drawCritical({ critical: { start, end, reach }, top, height }) {
    for (let i = countUntil(reach, this.low); i < start.length && start[i] < this.high; ) {
      const [x, wide] = this.across(start[i], end[i]);
      this.fill(this.theme.ink, x, top + height - 1, Math.max(wide, 1), 3);
      i = Math.max(i + 1, countUntil(start, this.low + (Math.floor(x + wide) + 1 - this.left) / this.scale, i) - 1);
    }
  }

  drawMemory(lane) {
    const { context, theme } = this;
    const { time, bytes } = lane;
    lane.most ??= bytes.reduce((a, b) => Math.max(a, b), 1);
    const height = lane.height - 2, y = (value) => lane.top + height - (Math.max(value, 0) / lane.most) * height;
    context.fillStyle = theme.box;
    context.strokeStyle = theme["box-edge"];
    context.beginPath();
    let i = Math.max(countUntil(time, this.low) - 1, 0);
    context.moveTo(this.x(Math.max(time[i], this.low)), lane.top + height);
    while (i < time.length && time[i] < this.high) {
      // In one pixel the most that is in use.
      const x = this.x(Math.max(time[i], this.low));
      const until = countUntil(time, this.low + (Math.floor(x) + 1 - this.left) / this.scale, i);
      let most = bytes[i];
      for (let k = i + 1; k < until; k++) most = Math.max(most, bytes[k]);
      i = Math.max(until, i + 1);
      context.lineTo(x, y(most));
      context.lineTo(i < time.length ? Math.min(this.x(time[i]), this.width) : this.width, y(bytes[i - 1]));
    }
    context.lineTo(this.width, lane.top + height);
    context.fill();
    context.stroke();
    this.write(`${inBytes(lane.most)} at most`, this.left + 4, lane.top + 8, 200, theme.ink);
  }

  /** A mark above each pixel that holds a match. */
  drawFound(lane, view) {
    const { context, theme } = this;
    const { matches } = lane;
    if (!matches || !matches.length) return;
    context.fillStyle = theme.found;
    for (let i = countUntil(matches, this.low); i < matches.length && matches[i] < this.high; ) {
      const x = this.x(matches[i]);
      context.fillRect(x - 1, lane.top - 3, 2.5, 3);
      i = Math.max(i + 1, countUntil(matches, this.low + (Math.floor(x) + 1 - this.left) / this.scale, i));
    }
  }

  drawMarked({ marked: [start, end], scrolled }) {
    const { context, theme } = this;
    context.fillStyle = theme.accent;
    context.globalAlpha = 0.15;
    const [x, wide] = this.across(start, end);
    if (wide > 0) context.fillRect(x, scrolled, wide, this.height);
    context.globalAlpha = 1;
    context.fillRect(this.x(start), scrolled, 1, this.height);
    context.fillRect(this.x(end), scrolled, 1, this.height);
    this.write(inUnits(end - start), Math.max(this.x(start), this.left) + 4, scrolled + HEAD + 6, 120, theme.ink);
  }

  /** What is chosen has a frame, and a line from its launch. */
  drawChosen({ chosen }) {
    const { context, theme } = this;
    const { lane, position } = chosen;
    const start = this.x(lane.row.start[position]);
    const [x, wide] = this.across(lane.row.start[position], lane.row.end[position]);
    context.strokeStyle = theme.ink;
    context.lineWidth = 2;
    if (wide >= 0) context.strokeRect(x - 1, lane.top - 1, Math.max(wide, 2) + 2, lane.height);
    const one = lane.row.index[position];
    const from = lane.kind === "stream" && lane.track.wait[one] >= 0 && lane.threads[lane.track.thread[one]];
    if (from) {
      context.lineWidth = 1.5;
      context.strokeStyle = theme.accent;
      context.beginPath();
      context.moveTo(this.x(lane.row.start[position] - lane.track.wait[one]), from.top);
      context.lineTo(start, lane.top);
      context.stroke();
    }
    context.lineWidth = 1;
  }

  drawTitles(view) {
    const { theme } = this;
    this.fill(theme.page, 0, view.scrolled, view.left, this.height);
    for (const lane of view.lanes) {
      if (lane.title) this.write(lane.title, 8, lane.top + Math.min(lane.height, 34) / 2 - 1, view.left - 16, theme.ink);
    }
    for (const part of view.parts) if (part.label) this.write(part.label, 8, part.top + PART / 2, view.left - 16, theme.ink, "600 ");
    this.fill(theme.line, view.left - 1, view.scrolled, 1, this.height);
  }

  /** Round times, at least 110 pixels apart and as far as their labels need, however many digits tell one from the next. */
  ticks(view) {
    const perPixel = (view.high - view.low) / (this.width - view.left), most = Math.max(Math.abs(view.low), Math.abs(view.high));
    const finest = Math.max(0, Math.ceil(-Math.log10((perPixel * 100) / 1e6)));
    const wish = perPixel * Math.max(110, this.context.measureText(inMs(most, finest)).width + 24);
    const power = 10 ** Math.floor(Math.log10(wish));
    const step = [1, 2, 5, 10].find((one) => one * power >= wish) * power;
    const at = [];
    for (let tick = Math.ceil(view.low / step) * step; tick < view.high; tick += step) at.push(tick);
    return { step, at };
  }

  /** Below the axis, as wide as the whole: which part of it is shown, where that is not all. */
  drawPlace(view) {
    if (view.low <= view.first && view.high >= view.last) return;
    const { theme } = this;
    const wide = this.width - view.left, share = wide / (view.last - view.first);
    const start = Math.max((view.low - view.first) * share, 0), end = Math.min((view.high - view.first) * share, wide);
    this.fill(theme.accent, view.left + Math.min(start, wide - 3), view.scrolled + HEAD - 3, Math.max(end - start, 3), 3);
  }

  drawAxis(view, { step, at }) {
    const { context, theme } = this;
    this.fill(theme.page, 0, view.scrolled, this.width, HEAD);
    this.fill(theme.line, 0, view.scrolled + HEAD - 1, this.width, 1);
    this.drawPlace(view);
    for (const tick of at) {
      const x = this.x(tick);
      this.fill(theme.line, x, view.scrolled + HEAD - 6, 1, 6);
      const digits = Math.max(0, -Math.floor(Math.log10(step / 1e6)));
      const label = inMs(tick, digits), room = context.measureText(label).width + 12;
      if (x + room < this.width) this.write(label, x + 3, view.scrolled + 9, room, theme.faint);
    }
    this.write(`ms since the ${view.parts[0].steps.length ? "first step" : "start"}`, 8, view.scrolled + 9, view.left - 12, theme.faint);
  }

  /** Writes as much of a text as there is room for. */
  write(text, x, y, room, color, weight = "") {
    const { context } = this;
    if (room < 12 || !text) return;
    if (weight) context.font = weight + this.font;
    const letter = (this.letter ??= context.measureText("abcdefghijklmnopqrstuvwxyz_0123").width / 31);
    let shown = text.length * letter * 1.9 > room ? text.slice(0, Math.ceil(room / letter) + 2) : text;
    while (shown && context.measureText(shown === text ? shown : `${shown}…`).width > room) {
      shown = shown.slice(0, Math.min(shown.length - 1, Math.floor(shown.length * 0.92)));
    }
    if (shown.length > 1 || shown === text) {
      context.fillStyle = color;
      context.fillText(shown === text ? shown : `${shown}…`, x, y);
    }
    if (weight) context.font = this.font;
  }
}

/** As countUntil, for a time that lies near behind a place. */
function galloped(sorted, time, from) {
  let step = 1, high = from;
  while (high < sorted.length && sorted[high] <= time) [from, high, step] = [high + 1, high + step, step * 2];
  return countUntil(sorted, time, from, Math.min(high, sorted.length));
}

/** Black or white, whichever is read better on a color, https://www.w3.org/TR/WCAG22/#dfn-relative-luminance. */
function inkOn(color) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16) / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff";
}
