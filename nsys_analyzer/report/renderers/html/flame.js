// The work of the GPU as nested bars: phases, the modules or ranges in them, classes, and kernels.

const BAR_HEIGHT = 22, MIN_SHARE = 0.0015;

/** Returns a tree of the work in the measured steps of the first capture of the view, in ns. */
function workTree(timeline) {
  const root = { name: `all ${timeline.parts[0].capture.on_cpu ? "CPU" : "GPU"} work`, ns: 0, count: 0, children: new Map() };
  const { capture } = timeline.parts[0];
  const byModule = capture.modules.length > 1;
  const rangesOf = (track, box) => {
    const phase = capture.phases[track.phase[box]] || "outside the phases";
    const module = capture.modules[track.module[box]];
    // Without modules, the path consists of the ranges around the launch, below that of the phase.
    if (byModule) return [phase, ...(module ? module.split(".") : [])];
    const path = capture.paths[track.path[box]].split(" / ").filter(Boolean);
    return [phase, ...path.slice(path.indexOf(phase) + 1)];
  };
  // Returns the nodes that contain a kernel, from the root down.
  const nodesOf = (lane, box) => {
    const { track } = lane;
    const nodes = [root];
    const add = (name, kind, color) => {
      const parent = nodes.at(-1);
      if (!parent.children.has(name)) parent.children.set(name, { name, kind, color, ns: 0, count: 0, children: new Map(), parent });
      nodes.push(parent.children.get(name));
    };
    for (const range of rangesOf(track, box)) add(range, "range");
    const color = timeline.colorOfGroup(lane, track.group[box]);
    add(capture.groups[track.group[box]], "class", color);
    const name = track.name[box];
    add(capture.labels[name] || capture.names[name], "kernel", color);
    return nodes;
  };
  for (const lane of timeline.lanes) {
    if (lane.kind !== "stream" || lane.part !== 0) continue;
    const { track } = lane;
    const place = byModule ? track.module : track.path, places = byModule ? capture.modules.length : capture.paths.length;
    const nodesByKey = new Map(); // the key identifies a phase, place, class and kernel
    for (const box of lane.row.index) {
      const key = ((track.phase[box] * places + place[box]) * capture.groups.length + track.group[box]) * capture.names.length + track.name[box];
      let nodes = nodesByKey.get(key);
      if (!nodes) nodesByKey.set(key, (nodes = nodesOf(lane, box)));
      for (const node of nodes) {
        node.ns += track.duration[box];
        node.count += 1;
      }
    }
  }
  return root;
}

/** Draws the tree as nested bars as wide as their time. A click on a bar zooms to it. */
function drawFlame(container, timeline) {
  const root = workTree(timeline);
  container.hidden = !root.ns;
  const { label, capture } = timeline.parts[0];
  const work = capture.on_cpu ? "CPU work" : "GPU work", leaf = capture.on_cpu ? "operator" : "kernel", level = capture.modules.length > 1 ? "module" : "range";
  container.replaceChildren(element("summary", `${work}${capture.steps.length ? " of all steps" : ""} by phase, ${level}, class and ${leaf}${label ? `, ${label}` : ""}`));
  const description = element("p", "", { class: "hint", "aria-live": "polite" });
  const bars = element("div", "", { class: "flame", role: "group", "aria-label": `${work} by phase, ${level}, class and name` });
  container.append(description, bars);
  const noun = operationNoun(capture);
  const show = (top) => {
    bars.replaceChildren();
    const levels = [];
    const addBar = (node, depth, left) => {
      const share = node.ns / top.ns;
      if (share < MIN_SHARE) return;
      const button = element("button", node.name, { type: "button", tabindex: depth || left ? "-1" : "0" });
      Object.assign(button.style, { left: `${100 * left}%`, width: `${100 * share}%`, top: `${depth * BAR_HEIGHT}px` });
      if (node.color) Object.assign(button.style, { background: node.color, color: textColorOn(node.color) });
      button.setAttribute("aria-label", describeNode(node, root, noun));
      button.title = describeNode(node, root, noun);
      button.node = node;
      button.addEventListener("click", () => show(node === top ? node.parent ?? root : node));
      button.addEventListener("focus", () => (description.textContent = describeNode(node, root, noun)));
      button.addEventListener("pointerenter", () => (description.textContent = describeNode(node, root, noun)));
      (levels[depth] ??= []).push(button);
      bars.append(button);
      let childLeft = left;
      for (const child of sortedChildren(node.children)) {
        addBar(child, depth + 1, childLeft);
        childLeft += child.ns / top.ns;
      }
    };
    addBar(top, 0, 0);
    bars.style.height = `${levels.length * BAR_HEIGHT + 2}px`;
    bars.levels = levels;
    description.textContent = describeNode(top, root, noun);
    if (bars.contains(document.activeElement) || bars.wasUsed) levels[0][0].focus({ preventScroll: true });
    bars.wasUsed = true;
  };
  bars.addEventListener("keydown", (event) => {
    const { levels } = bars, button = document.activeElement;
    const depth = levels.findIndex((level) => level.includes(button));
    if (depth < 0) return;
    const place = levels[depth].indexOf(button);
    const isChild = (other) => other.node.parent === button.node;
    const next = {
      ArrowLeft: () => levels[depth][place - 1], ArrowRight: () => levels[depth][place + 1],
      ArrowDown: () => levels[depth + 1]?.find(isChild), ArrowUp: () => levels[depth - 1]?.find((other) => other.node === button.node.parent),
    }[event.key]?.();
    if (event.key.startsWith("Arrow")) event.preventDefault();
    next?.focus();
  });
  show(root);
}

/** Returns ranges in order of occurrence, then classes and kernels with the longest first. */
function sortedChildren(children) {
  const rank = (node) => (node.kind === "range" ? 0 : 1);
  return [...children.values()].sort((a, b) => rank(a) - rank(b) || (rank(a) ? b.ns - a.ns : 0));
}

function describeNode(node, root, noun) {
  const share = ((100 * node.ns) / root.ns).toFixed(1);
  return `${node.name}: ${formatDuration(node.ns)}, ${share} % of ${root.name}, ${node.count.toLocaleString("en")} ${noun}`;
}
