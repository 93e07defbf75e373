// Starts the page when it is loaded.

async function start() {
  setUpPage();
  const data = document.getElementById("data");
  let timeline = null;
  addPicker((name) => {
    const number = timeline?.shared.views.findIndex((view) => (view.name ?? view.title) === name) ?? -1;
    if (number >= 0) timeline.show(number);
  });
  if (!data) return;
  const [first, ...lines] = data.textContent.split("\n");
  timeline = new Timeline(await decodeLine(first), lines);
  for (const button of document.querySelectorAll("button[data-view]")) {
    button.addEventListener("click", () => timeline.showFinding(button.dataset.kind, button.dataset.name, button.dataset.view));
  }
  await timeline.show(0);
  document.documentElement.dataset.ready = "true";
}

start();
