// Where the GPU's time goes, by what it is for: phases, in them modules or ranges, classes, and kernels.

const BAR = 22, LEAST_SHARE = 0.0015;

/** A tree of the work in the measured steps of the view's first capture, ns. */
function workTree(timeline) {
  const root = { name: `all ${timeline.parts[0].capture.on_cpu ? "CPU" : "GPU"} work`, ns: 0, count: 0, inner: new Map() };
  const { capture } = timeline.parts[0];
  const byModule = capture.modules.length > 1;
  const wordsOf = (track, one) => {
    const phase = capture.phases[track.phase[one]] || "outside the phases";
    const module = capture.modules[track.module[one]];
    // Without modules the ranges around the launch, those behind the phase's own.
    if (byModule) return [phase, ...(module ? module.split(".") : [])];
    const path = capture.paths[track.path[one]].split(" / ").filter(Boolean);
    const own = path.indexOf(phase);
    return [phase, ...path.slice(own + 1)];
  };
  // The nodes that a kernel lies in, from the root on.
  const nodesOf = (lane, one) => {
    const { track } = lane;
    const nodes = [root];
    const add = (name, kind, color) => {
      const around = nodes.at(-1);
      if (!around.inner.has(name)) around.inner.set(name, { name, kind, color, ns: 0, count: 0, inner: new Map(), around });
      nodes.push(around.inner.get(name));
    };
    for (const word of wordsOf(track, one)) add(word, "range");
    const color = timeline.colorOfGroup(lane, track.group[one]);
    add(capture.groups[track.group[one]], "class", color);
    const name = track.name[one];
    add(capture.labels[name] || capture.names[name], "kernel", color);
    return nodes;
  };
  for (const lane of timeline.lanes) {
    if (lane.kind !== "stream" || lane.part !== 0) continue;
    const { track } = lane;
    const place = byModule ? track.module : track.path, places = byModule ? capture.modules.length : capture.paths.length;
    const known = new Map(); // by what tells the work of one place and kernel from others
    for (const one of lane.row.index) {
      const key = ((track.phase[one] * places + place[one]) * capture.groups.length + track.group[one]) * capture.names.length + track.name[one];
      let nodes = known.get(key);
      if (!nodes) known.set(key, (nodes = nodesOf(lane, one)));
      for (const node of nodes) {
        node.ns += track.duration[one];
        node.count += 1;
      }
    }
  }
  return root;
}

/** Draws the tree as bars below each other, as wide as their time; a click on one fills the width with it. */
function drawFlame(place, timeline) {
  const root = workTree(timeline);
  place.hidden = !root.ns;
  const { label, capture } = timeline.parts[0];
  const work = capture.on_cpu ? "CPU work" : "GPU work", those = capture.on_cpu ? "operator" : "kernel", within = capture.modules.length > 1 ? "module" : "range";
  place.replaceChildren(element("summary", `${work}${capture.steps.length ? " of all steps" : ""} by phase, ${within}, class and ${those}${label ? `, ${label}` : ""}`));
  const said = element("p", "", { class: "hint", "aria-live": "polite" });
  const bars = element("div", "", { class: "flame", role: "group", "aria-label": `${work} by phase, ${within}, class and name` });
  place.append(said, bars);
  const pieces = piecesOf(capture);
  const show = (top) => {
    bars.replaceChildren();
    const levels = [];
    const put = (node, depth, from) => {
      const share = node.ns / top.ns;
      if (share < LEAST_SHARE) return;
      const button = element("button", node.name, { type: "button", tabindex: depth || from ? "-1" : "0" });
      Object.assign(button.style, { left: `${100 * from}%`, width: `${100 * share}%`, top: `${depth * BAR}px` });
      if (node.color) Object.assign(button.style, { background: node.color, color: inkOn(node.color) });
      button.setAttribute("aria-label", told(node, root, pieces));
      button.title = told(node, root, pieces);
      button.node = node;
      button.addEventListener("click", () => show(node === top ? node.around ?? root : node));
      button.addEventListener("focus", () => (said.textContent = told(node, root, pieces)));
      button.addEventListener("pointerenter", () => (said.textContent = told(node, root, pieces)));
      (levels[depth] ??= []).push(button);
      bars.append(button);
      let inside = from;
      for (const one of inOrder(node.inner)) {
        put(one, depth + 1, inside);
        inside += one.ns / top.ns;
      }
    };
    put(top, 0, 0);
    bars.style.height = `${levels.length * BAR + 2}px`;
    bars.levels = levels;
    said.textContent = told(top, root, pieces);
    if (bars.contains(document.activeElement) || bars.wasUsed) levels[0][0].focus({ preventScroll: true });
    bars.wasUsed = true;
  };
  bars.addEventListener("keydown", (event) => {
    const { levels } = bars, button = document.activeElement;
    const depth = levels.findIndex((level) => level.includes(button));
    if (depth < 0) return;
    const at = levels[depth].indexOf(button);
    const inside = (one) => one.node.around === button.node;
    const next = {
      ArrowLeft: () => levels[depth][at - 1], ArrowRight: () => levels[depth][at + 1],
      ArrowDown: () => levels[depth + 1]?.find(inside), ArrowUp: () => levels[depth - 1]?.find((one) => one.node === button.node.around),
    }[event.key]?.();
    if (event.key.startsWith("Arrow")) event.preventDefault();
    next?.focus();
  });
  show(root);
}

/** Ranges in the order in which they come, then classes and kernels, the longest first. */
function inOrder(inner) {
  const rank = (node) => (node.kind === "range" ? 0 : 1);
  return [...inner.values()].sort((a, b) => rank(a) - rank(b) || (rank(a) ? b.ns - a.ns : 0));
}

function told(node, root, pieces) {
  const share = ((100 * node.ns) / root.ns).toFixed(1);
  return `${node.name}: ${inUnits(node.ns)}, ${share} % of ${root.name}, ${node.count.toLocaleString("en")} ${pieces}`;
}
