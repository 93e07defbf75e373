// The interactive parts of the page: sortable tables, commands to copy, and a picker of captures.

/** Returns a new element with attributes and a text, which is never parsed as HTML. */
function element(tag, text = "", attributes = {}) {
  const created = document.createElement(tag);
  created.textContent = text;
  for (const [key, value] of Object.entries(attributes)) created.setAttribute(key, value);
  return created;
}

const MIN_SORTABLE_ROWS = 8;

function makeSortable(table) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const order = new Map([...body.rows].map((row, place) => [row, place]));
  if (order.size < MIN_SORTABLE_ROWS) return;
  heads.forEach((head, column) => {
    const button = element("button", "", { type: "button" });
    button.append(...head.childNodes);
    head.replaceChildren(button);
    head.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const current = head.getAttribute("aria-sort");
      // The first click sorts numbers from the largest and names from A; the third click restores the order of the report.
      const first = head.classList.contains("number") ? "descending" : "ascending";
      const second = first === "ascending" ? "descending" : "ascending";
      const next = current === "none" ? first : current === first ? second : "none";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", next);
      const rows = [...order.keys()];
      if (next !== "none") rows.sort((a, b) => compareCells(a.cells[column], b.cells[column], next === "ascending" ? 1 : -1));
      body.append(...rows);
    });
  });
}

/** Compares cells by value, with cells without a value last, or by text, with numbers in texts by value. */
function compareCells(left, right, sign) {
  const [a, b] = [left.dataset.value, right.dataset.value];
  if (a !== undefined && b !== undefined) return sign * (Number(a) - Number(b));
  if (a !== undefined || b !== undefined) return a !== undefined ? -1 : 1;
  return sign * left.textContent.localeCompare(right.textContent, "en", { numeric: true });
}

/** Lets the keyboard scroll a table that is wider than the page. */
function makeScrollable(box) {
  const isScrollable = box.scrollWidth > box.clientWidth;
  if (isScrollable) {
    box.tabIndex = 0;
    box.setAttribute("role", "group"); // unlike a landmark, a group needs no unique name
    box.setAttribute("aria-label", box.querySelector("caption")?.textContent || "Table");
  } else {
    for (const name of ["tabindex", "role", "aria-label"]) box.removeAttribute(name);
  }
}

function addCopyButton(listing) {
  const button = element("button", "Copy", { type: "button", class: "copy" });
  const code = listing.querySelector("code");
  button.addEventListener("click", async () => {
    const isCopied = await copyText(code);
    button.textContent = isCopied ? "Copied" : "Press Ctrl+C";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  listing.append(button);
}

/** Copies the text of an element. If the browser forbids it, the text is selected for the user to copy. */
async function copyText(code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    return true;
  } catch {
    getSelection().selectAllChildren(code);
    return document.execCommand("copy");
  }
}

/** Adds a picker of captures to a page with several: it hides what is about other captures only. */
function addPicker(onPick) {
  const blocks = [...document.querySelectorAll("[data-capture]")];
  const names = [...new Set(blocks.map((block) => block.dataset.capture))];
  if (names.length < 2) return;
  const select = element("select", "", { id: "picker" });
  select.append(element("option", "All", { value: "" }), ...names.map((name) => element("option", name)));
  const label = element("label", "Capture ");
  label.append(select);
  document.getElementById("tools").append(label);
  const rows = [...document.querySelectorAll("tr[data-row]")];
  select.addEventListener("change", () => {
    const name = select.value;
    for (const block of blocks) {
      const isPicked = block.dataset.capture === name;
      block.hidden = name !== "" && !isPicked;
      // The picked capture is folded only if there are others, so it is unfolded.
      const isFoldedCapture = block.tagName === "DETAILS" && block.parentElement.tagName === "SECTION";
      if (isPicked && isFoldedCapture) block.open = true;
    }
    // The overview of all captures is hidden if one is picked.
    for (const overview of document.querySelectorAll("#overview")) overview.hidden = name !== "";
    for (const row of rows) row.classList.toggle("picked", name !== "" && row.dataset.row === name);
    onPick(name);
  });
}

function setUpPage() {
  document.querySelectorAll(".table > table").forEach(makeSortable);
  document.querySelectorAll(".listing").forEach(addCopyButton);
  const boxes = [...document.querySelectorAll(".table")];
  const observer = new ResizeObserver((entries) => entries.forEach(({ target }) => makeScrollable(target)));
  boxes.forEach((box) => observer.observe(box));
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open]):not(.name)")];
    opened.forEach((details) => (details.open = true));
  });
  addEventListener("afterprint", () => opened.forEach((details) => (details.open = false)));
}
