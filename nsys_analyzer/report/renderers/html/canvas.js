// The lanes of the timeline, which are boxes over one axis in nanoseconds, and how each lane is drawn.

/** The height of a lane of each kind, in pixels. */
const HEIGHTS = { ranges: 20, calls: 20, lines: 20, stream: 64, idle: 26, memory: 48, counter: 30 };
const LANE_GAP = 6, AXIS_HEIGHT = 22, PART_TITLE_HEIGHT = 22;

/** Returns how many of the sorted times are at or before a time. */
function countUntil(sorted, time, low = 0, high = sorted.length) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= time) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Boxes in order of start: their starts and ends, and the index of each in its track. */
class Row {
  constructor(track, index) {
    const { length } = index;
    this.index = index;
    this.start = new Float64Array(length);
    this.end = new Float64Array(length);
    this.covered = new Float64Array(length + 1);
    // The latest end up to each box: kernels of one stream can overlap, if the next one starts early.
    this.latestEnd = new Float64Array(length);
    // A loop takes a tenth of the time of Float64Array.from with a function.
    for (let i = 0; i < length; i++) {
      this.start[i] = track.start[index[i]];
      this.end[i] = this.start[i] + track.duration[index[i]];
      this.covered[i + 1] = this.covered[i] + this.end[i] - this.start[i];
      this.latestEnd[i] = i ? Math.max(this.end[i], this.latestEnd[i - 1]) : this.end[i];
    }
  }

  /** Returns the time that boxes cover before a time; `started` is the number of boxes that have started by then. */
  coveredUntil(time, started) {
    let sum = this.covered[started];
    for (let i = started - 1; i >= 0 && this.latestEnd[i] > time; i--) sum -= Math.max(this.end[i] - time, 0);
    return sum;
  }

  coveredBefore(time, low = 0) {
    return this.coveredUntil(time, countUntil(this.start, time, low));
  }

  coveredBetween(start, end) {
    return this.coveredBefore(end) - this.coveredBefore(start);
  }
}

/** A lane: a track of a capture, or the boxes of a nested track at one depth. */
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
      const rows = [...members].map(([group, indexes]) => [group, new Row(track, Int32Array.from(indexes))]);
      rows.sort((a, b) => b[1].covered.at(-1) - a[1].covered.at(-1));
      this.groups = new Map(rows);
    }
  }

  /** Returns the position of the first box that ends at or after a time. */
  firstEndingAfter(time) {
    let position = countUntil(this.row.start, time - this.longest);
    while (position < this.row.start.length && this.row.end[position] < time) position++;
    return position;
  }

  /** Returns the position of the box at a time, or of the nearest box within a tolerance, or -1. */
  findBox(time, tolerance = 0) {
    const { start, end } = this.row;
    let nearest = -1, smallest = tolerance;
    for (let i = countUntil(start, time + tolerance) - 1; i >= 0 && start[i] > time - tolerance - this.longest; i--) {
      const distance = time < start[i] ? start[i] - time : time > end[i] ? time - end[i] : 0;
      if (distance === 0) return i;
      if (distance <= smallest) [nearest, smallest] = [i, distance];
    }
    return nearest;
  }
}

/** Returns the cumulative sums of the differences in the page's data. */
function cumulativeSums(differences) {
  const values = new Float64Array(differences.length);
  let sum = 0;
  for (let i = 0; i < values.length; i++) values[i] = sum += differences[i];
  return values;
}

/** Returns the lanes of part `number` of a view: of a capture whose time 0 is at `offset` on the axis. */
function makeLanes(capture, offset, number) {
  const lanes = [];
  const threads = [];
  const addLevel = (title, kind, times, values, format, most) => {
    const time = cumulativeSums(times).map((time) => time + offset);
    lanes.push({ title, kind, part: number, height: HEIGHTS[kind], time, values: cumulativeSums(values), format, most });
  };
  const addLevels = () => {
    const { memory } = capture;
    if (memory.time.length) addLevel("Device memory", "memory", memory.time, memory.bytes, formatBytes);
    for (const { title, unit, time, value } of capture.levels) {
      addLevel(title, "counter", time, value, (value) => formatLevel(value, unit), unit === "%" ? 100 : undefined);
    }
  };
  // Memory and counters follow the tracks of the device. Threads that launch nothing come last.
  const lastDeviceTrack = capture.tracks.findLastIndex((track) => track.kind === "stream" || track.kind === "idle");
  if (lastDeviceTrack < 0) addLevels();
  capture.tracks.forEach((track, place) => {
    const start = cumulativeSums(track.start);
    for (let i = 0; i < start.length; i++) start[i] += offset;
    const shifted = { ...track, start, duration: Float64Array.from(track.duration) };
    const isNested = ["ranges", "calls", "lines"].includes(track.kind);
    const depths = isNested ? 1 + track.depth.reduce((a, b) => Math.max(a, b), 0) : 1;
    const members = Array.from({ length: depths }, () => []);
    for (let i = 0; i < start.length; i++) members[isNested ? track.depth[i] : 0].push(i);
    members.forEach((index, depth) => {
      const lane = new Lane(depth ? "" : track.title, track.kind, shifted, number, Int32Array.from(index));
      if (track.critical) lane.critical = new Row(shifted, Int32Array.from(cumulativeSums(track.critical)));
      if (track.kind === "ranges" && !depth) threads.push(lane);
      lanes.push(lane);
    });
    if (place === lastDeviceTrack) addLevels();
  });
  for (const lane of lanes) lane.threads = threads;
  return lanes;
}

/** Returns the noun for the boxes of a capture's streams. */
function operationNoun(capture) {
  return capture.on_cpu ? "operators" : "kernels and copies";
}

/** Unpacks a line of the page's data. */
async function decodeLine(line) {
  const text = atob(line);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

/** Returns a duration with its unit. */
function formatDuration(ns) {
  const size = Math.abs(ns);
  if (size >= 1e9) return `${Number((ns / 1e9).toPrecision(4)).toLocaleString("en")} s`;
  if (size >= 1e6) return `${Number((ns / 1e6).toPrecision(4)).toLocaleString("en")} ms`;
  if (size >= 1e3) return `${(ns / 1e3).toPrecision(4)} µs`;
  return `${Math.round(ns)} ns`;
}

/** Returns a time in ms with a number of decimal places. */
function formatMs(ns, digits) {
  return (ns / 1e6).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits, signDisplay: "negative" });
}

function formatBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (Math.abs(bytes) >= 1024 && power < units.length - 1) [bytes, power] = [bytes / 1024, power + 1];
  return `${bytes.toFixed(power ? 1 : 0)} ${units[power]}`;
}

/** Returns the value of a counter with its unit. A negative value was not measured. */
function formatLevel(value, unit) {
  if (value < 0) return "not sampled";
  return unit === "B/s" ? `${formatBytes(value)}/s` : `${value.toLocaleString("en")} ${unit}`;
}

/** Draws lanes onto a canvas, in the theme of the page. */
class Painter {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
  }

  /** Reads the colors of the page, which follow the color scheme of the system. */
  readTheme() {
    const style = getComputedStyle(document.documentElement);
    const names = ["page", "panel", "line", "ink", "faint", "track", "box", "box-edge", "box-ink", "accent", "match"];
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

  /** Draws one frame of a view, which is a Timeline. */
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
    if (view.markedRange) this.drawMarkedRange(view);
    if (view.selection) this.drawSelection(view);
    context.restore();
    this.drawTitles(view);
    this.drawAxis(view, ticks);
    context.restore();
  }

  fill(color, x, y, width, height) {
    this.context.fillStyle = color;
    this.context.fillRect(x, y, width, height);
  }

  x(time) {
    return this.left + (time - this.low) * this.scale;
  }

  /** Returns the left edge and the width of an interval, cut just outside the view: a canvas has limited coordinates. */
  extent(start, end) {
    const x = Math.max(this.x(start), this.left - 4);
    return [x, Math.min(this.x(end), this.width + 4) - x];
  }

  drawSteps(view) {
    const { theme } = this;
    for (const part of view.parts) {
      for (const [start, end] of part.steps.filter((_, number) => number % 2 === 0)) {
        if (end <= this.low || start >= this.high) continue;
        const [x, width] = this.extent(start, end);
        this.fill(theme.panel, x, part.top, width, part.bottom - part.top);
      }
    }
  }

  /** Draws a vertical line at each tick of the axis, for lanes far below the axis. */
  drawGrid(view, { at }) {
    const { theme } = this;
    for (const tick of at) this.fill(theme.line, this.x(tick), view.scrolled, 1, this.height);
  }

  drawLane(lane, view) {
    if (lane.values) this.drawLevel(lane);
    else if (lane.kind === "stream" || lane.kind === "idle") this.drawWork(lane, view);
    else this.drawBoxes(lane, view);
    if (lane.critical) this.drawCritical(lane);
    if (view.isSearching) this.drawMatches(lane, view);
  }

  /** Draws ranges, calls or lines as boxes with their names. Of boxes narrower than a pixel, it draws one per pixel. */
  drawBoxes(lane, view) {
    const { context, theme } = this;
    const { start, end, index } = lane.row;
    const height = lane.height - 2;
    let lastPixel = -Infinity;
    for (let i = lane.firstEndingAfter(this.low); i < start.length && start[i] < this.high; ) {
      const x = Math.max(this.x(start[i]), this.left - 2);
      const width = Math.min(this.x(end[i]), this.width + 2) - x;
      if (width >= 1) {
        context.globalAlpha = view.isSearching && !lane.isMatch(index[i]) ? 0.35 : 1;
        this.fill(theme.box, x, lane.top, width, height);
        if (width > 3) {
          this.fill(theme["box-edge"], x, lane.top, 1, height);
          this.fill(theme["box-edge"], x, lane.top, width, 1);
        }
        if (width > 24) this.write(view.textOf(lane, index[i]), x + 4, lane.top + height / 2 + 0.5, width - 8, theme["box-ink"]);
        context.globalAlpha = 1;
        i++;
      } else {
        if (x >= lastPixel + 1) {
          this.fill(theme["box-edge"], x, lane.top, 1, height);
          lastPixel = Math.floor(x);
        }
        // Continues with the last box that starts in this pixel, since only this one can extend beyond it.
        i = Math.max(i + 1, countUntil(start, this.low + (Math.floor(x) + 1 - this.left) / this.scale, i) - 1);
      }
    }
  }

  /** Draws work or idle time: as boxes if they have room, otherwise as the share of each color in each pixel. */
  drawWork(lane, view) {
    const { context, theme } = this;
    this.fill(theme.track, this.left, lane.top, this.width - this.left, lane.height - 2);
    const first = lane.firstEndingAfter(this.low), last = countUntil(lane.row.start, this.high);
    if (last - first > (this.width - this.left) / 2) return this.drawShares(lane, view);
    const { start, end, index } = lane.row;
    const height = lane.height - 2;
    for (let i = first; i < last; i++) {
      const box = index[i], [x, exactWidth] = this.extent(start[i], end[i]), width = Math.max(exactWidth, 0.7);
      context.globalAlpha = view.isDimmed(lane, box) ? 0.25 : 1;
      this.fill(view.colorOfGroup(lane, lane.track.group[box]), x, lane.top, width, height);
      if (width > 34) {
        const left = Math.max(x, this.left);
        this.write(view.textOf(lane, box), left + 4, lane.top + height / 2, Math.min(x + width, this.width) - left - 8, textColorOn(context.fillStyle));
      }
    }
    context.globalAlpha = 1;
    return undefined;
  }

  /** Draws the share of each color in each pixel. */
  drawShares(lane, view) {
    const { context } = this;
    const columns = Math.ceil(this.width - this.left), ns = 1 / this.scale, height = lane.height - 2;
    const bottom = new Float64Array(columns).fill(lane.top + height);
    for (const [group, row] of lane.groups) {
      context.fillStyle = view.colorOfGroup(lane, group);
      context.globalAlpha = view.isGroupDimmed(lane, group) ? 0.25 : 1;
      let started = countUntil(row.start, this.low);
      let covered = row.coveredBefore(this.low, Math.max(started - 1, 0));
      for (let column = 0; column < columns; column++) {
        const time = this.low + (column + 1) * ns;
        started = countUntilFrom(row.start, time, started);
        const nowCovered = row.coveredUntil(time, started);
        if (nowCovered > covered) {
          const share = Math.min((nowCovered - covered) / ns, 1);
          const top = Math.max(bottom[column] - share * height, lane.top);
          context.fillRect(this.left + column, top, 1, bottom[column] - top);
          bottom[column] = top;
        }
        covered = nowCovered;
      }
    }
    context.globalAlpha = 1;
  }

  /** Draws a bar below the boxes on the critical path. Of boxes narrower than a pixel, it draws one per pixel. */
  drawCritical({ critical: { start, end, latestEnd }, top, height }) {
    for (let i = countUntil(latestEnd, this.low); i < start.length && start[i] < this.high; ) {
      const [x, width] = this.extent(start[i], end[i]);
      this.fill(this.theme.ink, x, top + height - 1, Math.max(width, 1), 3);
      i = Math.max(i + 1, countUntil(start, this.low + (Math.floor(x + width) + 1 - this.left) / this.scale, i) - 1);
    }
  }

  /** Draws a value over time, such as the memory in use, and its largest value. */
  drawLevel(lane) {
    const { context, theme } = this;
    const { time, values } = lane;
    lane.peak ??= values.reduce((a, b) => Math.max(a, b), 1);
    lane.most ??= lane.peak;
    const height = lane.height - 2, y = (value) => lane.top + height - (Math.max(value, 0) / lane.most) * height;
    context.fillStyle = theme.box;
    context.strokeStyle = theme["box-edge"];
    context.beginPath();
    let i = Math.max(countUntil(time, this.low) - 1, 0);
    context.moveTo(this.x(Math.max(time[i], this.low)), lane.top + height);
    while (i < time.length && time[i] < this.high) {
      // Each pixel shows the maximum.
      const x = this.x(Math.max(time[i], this.low));
      const until = countUntil(time, this.low + (Math.floor(x) + 1 - this.left) / this.scale, i);
      let most = values[i];
      for (let k = i + 1; k < until; k++) most = Math.max(most, values[k]);
      i = Math.max(until, i + 1);
      context.lineTo(x, y(most));
      context.lineTo(i < time.length ? Math.min(this.x(time[i]), this.width) : this.width, y(values[i - 1]));
    }
    context.lineTo(this.width, lane.top + height);
    context.fill();
    context.stroke();
    this.write(`peak ${lane.format(lane.peak)}`, this.left + 4, lane.top + 8, 200, theme.ink);
  }

  /** Draws a mark above each pixel with a match. */
  drawMatches(lane, view) {
    const { context, theme } = this;
    const { matches } = lane;
    if (!matches || !matches.length) return;
    context.fillStyle = theme.match;
    for (let i = countUntil(matches, this.low); i < matches.length && matches[i] < this.high; ) {
      const x = this.x(matches[i]);
      context.fillRect(x - 1, lane.top - 3, 2.5, 3);
      i = Math.max(i + 1, countUntil(matches, this.low + (Math.floor(x) + 1 - this.left) / this.scale, i));
    }
  }

  drawMarkedRange({ markedRange: [start, end], scrolled }) {
    const { context, theme } = this;
    context.fillStyle = theme.accent;
    context.globalAlpha = 0.15;
    const [x, width] = this.extent(start, end);
    if (width > 0) context.fillRect(x, scrolled, width, this.height);
    context.globalAlpha = 1;
    context.fillRect(this.x(start), scrolled, 1, this.height);
    context.fillRect(this.x(end), scrolled, 1, this.height);
    this.write(formatDuration(end - start), Math.max(this.x(start), this.left) + 4, scrolled + AXIS_HEIGHT + 6, 120, theme.ink);
  }

  /** Draws a frame around the selected box, and a line from its launch. */
  drawSelection({ selection }) {
    const { context, theme } = this;
    const { lane, position } = selection;
    const start = this.x(lane.row.start[position]);
    const [x, width] = this.extent(lane.row.start[position], lane.row.end[position]);
    context.strokeStyle = theme.ink;
    context.lineWidth = 2;
    if (width >= 0) context.strokeRect(x - 1, lane.top - 1, Math.max(width, 2) + 2, lane.height);
    const box = lane.row.index[position];
    const launchLane = lane.kind === "stream" && lane.track.wait[box] >= 0 && lane.threads[lane.track.thread[box]];
    if (launchLane) {
      context.lineWidth = 1.5;
      context.strokeStyle = theme.accent;
      context.beginPath();
      context.moveTo(this.x(lane.row.start[position] - lane.track.wait[box]), launchLane.top);
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
    for (const part of view.parts) if (part.label) this.write(part.label, 8, part.top + PART_TITLE_HEIGHT / 2, view.left - 16, theme.ink, "600 ");
    this.fill(theme.line, view.left - 1, view.scrolled, 1, this.height);
  }

  /** Returns round times for ticks, at least 110 pixels apart and far enough for their labels. */
  ticks(view) {
    const perPixel = (view.high - view.low) / (this.width - view.left), most = Math.max(Math.abs(view.low), Math.abs(view.high));
    const decimals = Math.max(0, Math.ceil(-Math.log10((perPixel * 100) / 1e6)));
    const minStep = perPixel * Math.max(110, this.context.measureText(formatMs(most, decimals)).width + 24);
    const power = 10 ** Math.floor(Math.log10(minStep));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= minStep) * power;
    const at = [];
    for (let tick = Math.ceil(view.low / step) * step; tick < view.high; tick += step) at.push(tick);
    return { step, at };
  }

  /** Draws a bar below the axis that shows which part of the whole time is in view, unless all of it is. */
  drawOverview(view) {
    if (view.low <= view.first && view.high >= view.last) return;
    const { theme } = this;
    const width = this.width - view.left, share = width / (view.last - view.first);
    const start = Math.max((view.low - view.first) * share, 0), end = Math.min((view.high - view.first) * share, width);
    this.fill(theme.accent, view.left + Math.min(start, width - 3), view.scrolled + AXIS_HEIGHT - 3, Math.max(end - start, 3), 3);
  }

  drawAxis(view, { step, at }) {
    const { context, theme } = this;
    this.fill(theme.page, 0, view.scrolled, this.width, AXIS_HEIGHT);
    this.fill(theme.line, 0, view.scrolled + AXIS_HEIGHT - 1, this.width, 1);
    this.drawOverview(view);
    for (const tick of at) {
      const x = this.x(tick);
      this.fill(theme.line, x, view.scrolled + AXIS_HEIGHT - 6, 1, 6);
      const digits = Math.max(0, -Math.floor(Math.log10(step / 1e6)));
      const label = formatMs(tick, digits), room = context.measureText(label).width + 12;
      if (x + room < this.width) this.write(label, x + 3, view.scrolled + 9, room, theme.faint);
    }
    this.write(`ms since the ${view.parts[0].steps.length ? "first step" : "start"}`, 8, view.scrolled + 9, view.left - 12, theme.faint);
  }

  /** Writes a text, shortened to the given room. */
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

/** Does the same as countUntil, but faster if the result is slightly larger than `from`. */
function countUntilFrom(sorted, time, from) {
  let step = 1, high = from;
  while (high < sorted.length && sorted[high] <= time) [from, high, step] = [high + 1, high + step, step * 2];
  return countUntil(sorted, time, from, Math.min(high, sorted.length));
}

/** Returns black or white, whichever has more contrast: https://www.w3.org/TR/WCAG22/#dfn-relative-luminance. */
function textColorOn(color) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16) / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff";
}
