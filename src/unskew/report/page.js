// Draws each figure from the JSON beside it. Expressions are interpreted, not compiled: the page's policy allows no eval.
"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches; // where a finger scrolls the page, it does not move a chart
  const drawn = [];
  const draw = () => Promise.all([...document.querySelectorAll("figure")].map(async (figure, place) => {
    const spec = JSON.parse(figure.querySelector("script").textContent);
    if (touch) delete spec.params;
    if (drawn[place]) drawn[place].finalize();
    drawn[place] = await vegaEmbed(figure.querySelector(".chart"), spec, {
      mode: "vega-lite", renderer: "svg", actions: false, ast: true,
      tooltip: { theme: dark.matches ? "dark" : "light" },
      loader: { http: { }, load: () => Promise.reject(new Error("nothing is loaded")) },
    });
  })).then(() => { document.documentElement.dataset.drawn = String(drawn.length); });
  dark.addEventListener("change", draw);
  draw();
})();
