// What htmx does not do by itself: sliders beside numbers, addresses without empty fields, and a word on what has changed for those
// who do not see it.
(() => {
  "use strict";
  const status = document.getElementById("status"), twin = document.getElementById("twin");
  let saying;

  function say(text) {
    clearTimeout(saying);
    // when the values rest: a reader would not follow every stop of a slider
    saying = setTimeout(() => { status.textContent = text; }, 400);
  }

  // ---- sliders: the number is what is sent; the slider moves it in even steps of its scale
  const POSITIONS = 100;
  const bases = { log2: 2, log10: 10 };
  const rounded = (value, scale) => (scale === "log10" ? Number(value.toPrecision(2)) : Math.round(value));

  function slider(number) {
    const { scale } = number.dataset, low = Number(number.dataset.low), high = Number(number.dataset.high), base = bases[scale];
    const range = document.createElement("input");
    range.type = "range";
    range.tabIndex = 0;
    const label = number.closest("label").firstChild.textContent.trim();
    range.setAttribute("aria-label", label + ", slider");
    const log = (value) => Math.log(value) / Math.log(base);
    const steps = base === 2 ? Math.round(log(high / low)) * 4 : base ? POSITIONS : high - low;
    range.min = 0;
    range.max = steps;
    const toValue = (position) => (base ? rounded(low * (high / low) ** (position / steps), scale) : low + Number(position));
    const toPosition = (value) => (base ? (log(value / low) / log(high / low)) * steps : value - low);
    const put = () => {
      range.value = toPosition(Math.max(low, Number(number.value) || low));
      range.setAttribute("aria-valuetext", number.value);
    };
    put();
    number.addEventListener("input", put);
    range.addEventListener("input", () => {
      number.value = toValue(range.value);
      range.setAttribute("aria-valuetext", number.value);
    });
    number.closest("label").append(range);
  }
  document.querySelectorAll("input[data-scale]").forEach(slider);

  // ---- another model: the other values of its group belong to the model before, and the page fills them in again
  const model = document.querySelector("#sliders #f-model");
  model?.addEventListener("input", (event) => event.stopPropagation());
  model?.addEventListener("change", (event) => {
    event.stopPropagation();
    const values = new FormData(model.form);
    for (const { name } of model.closest("fieldset").elements) if (name && name !== "model") values.delete(name);
    location.search = new URLSearchParams([...values].filter(([, value]) => value !== ""));
  });

  // ---- htmx
  document.addEventListener("htmx:config:request", (event) => {
    const { request } = event.detail.ctx;
    if (request.body instanceof FormData) for (const [name, value] of [...request.body]) if (value === "") request.body.delete(name);
  });
  document.addEventListener("htmx:after:swap", () => {
    const answer = document.getElementById("answer");
    if (!answer) return;
    if (answer.dataset.said) say(answer.dataset.said);
    if (twin && answer.dataset.twin) twin.href = answer.dataset.twin;
  });
  document.addEventListener("htmx:error", () => say("The server does not answer."));
})();
