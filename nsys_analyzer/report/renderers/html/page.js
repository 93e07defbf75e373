// What paper cannot: tables that sort, commands to copy, one capture of many to pick.

/** A new element with text and attributes; text is never read as HTML. */
function element(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

const FEW_ROWS = 8;

function makeSortable(table) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const order = new Map([...body.rows].map((row, place) => [row, place]));
  if (order.size < FEW_ROWS) return;
  heads.forEach((head, column) => {
    const button = element("button", "", { type: "button" });
    button.append(...head.childNodes);
    head.replaceChildren(button);
    head.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const before = head.getAttribute("aria-sort");
      // A number is asked for by its size, a name by the alphabet; the third click brings the order of the report back.
      const first = head.classList.contains("number") ? "descending" : "ascending";
      const second = first === "ascending" ? "descending" : "ascending";
      const now = before === "none" ? first : before === first ? second : "none";
      heads.forEach((one) => one.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", now);
      const rows = [...order.keys()];
      if (now !== "none") rows.sort((a, b) => compareCells(a.cells[column], b.cells[column], now === "ascending" ? 1 : -1));
      body.append(...rows);
    });
  });
}

/** Cells by their value, those without one last; texts by the alphabet, numbers in them by their size. */
function compareCells(one, other, sign) {
  const [a, b] = [one.dataset.value, other.dataset.value];
  if (a !== undefined && b !== undefined) return sign * (Number(a) - Number(b));
  if (a !== undefined || b !== undefined) return a !== undefined ? -1 : 1;
  return sign * one.textContent.localeCompare(other.textContent, "en", { numeric: true });
}

/** What is wider than the page can be scrolled by keyboard, too. */
function makeReachable(box) {
  const wide = box.scrollWidth > box.clientWidth;
  if (wide) {
    box.tabIndex = 0;
    box.setAttribute("role", "group"); // no landmark, which each would need a name of its own
    box.setAttribute("aria-label", box.querySelector("caption")?.textContent || "Table");
  } else {
    for (const name of ["tabindex", "role", "aria-label"]) box.removeAttribute(name);
  }
}

function addCopyButton(listing) {
  const button = element("button", "Copy", { type: "button", class: "copy" });
  const code = listing.querySelector("code");
  button.addEventListener("click", async () => {
    const done = await copied(code);
    button.textContent = done ? "Copied" : "Press Ctrl+C";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  listing.append(button);
}

/** Copies the text of an element; where a browser forbids it, the text is selected for the user to copy. */
async function copied(code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    return true;
  } catch {
    getSelection().selectAllChildren(code);
    return document.execCommand("copy");
  }
}

/** A choice of one capture, where the page has several: what tells of others alone is hidden. */
function addPicker(onPick) {
  const told = [...document.querySelectorAll("[data-capture]")];
  const names = [...new Set(told.map((one) => one.dataset.capture))];
  if (names.length < 2) return;
  const select = element("select", "", { id: "picker" });
  select.append(element("option", "All", { value: "" }), ...names.map((name) => element("option", name)));
  const label = element("label", "Capture ");
  label.append(select);
  document.getElementById("tools").append(label);
  const rows = [...document.querySelectorAll("tr[data-row]")];
  select.addEventListener("change", () => {
    const name = select.value;
    for (const one of told) {
      const isPicked = one.dataset.capture === name;
      one.hidden = name !== "" && !isPicked;
      // What is folded because of the others is unfolded.
      const folded = one.tagName === "DETAILS" && one.parentElement.tagName === "SECTION";
      if (isPicked && folded) one.open = true;
    }
    // What tells of all captures makes room for the one that was picked.
    for (const one of document.querySelectorAll("#overview")) one.hidden = name !== "";
    for (const row of rows) row.classList.toggle("picked", name !== "" && row.dataset.row === name);
    onPick(name);
  });
}

function setUpPage() {
  document.querySelectorAll(".table > table").forEach(makeSortable);
  document.querySelectorAll(".listing").forEach(addCopyButton);
  const boxes = [...document.querySelectorAll(".table")];
  const watch = new ResizeObserver((changed) => changed.forEach((one) => makeReachable(one.target)));
  boxes.forEach((box) => watch.observe(box));
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open]):not(.name)")];
    opened.forEach((one) => (one.open = true));
  });
  addEventListener("afterprint", () => opened.forEach((one) => (one.open = false)));
}
