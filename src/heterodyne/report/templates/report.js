(() => {
  "use strict";
  const tip = document.getElementById("tip");
  const place = (event, text) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 8)) + "px";
    tip.style.top = (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18) + "px";
  };
  const hide = () => { tip.hidden = true; };

  // One listener for the whole page: a timeline may have tens of thousands of bars.
  for (const kind of ["pointermove", "pointerdown"]) {
    document.addEventListener(kind, (event) => {
      const named = event.target.closest && event.target.closest("[data-t]");
      if (named) place(event, named.dataset.t);
      else if (!(event.target.closest && event.target.closest("[data-chart]"))) hide();
    });
  }
  document.addEventListener("scroll", hide, true);

  // Both timelines zoom and scroll as one, so that they keep one time axis.
  for (const group of document.querySelectorAll(".timelines")) {
    const views = [...group.querySelectorAll(".scroll")];
    const buttons = [...group.querySelectorAll("[data-zoom]")];
    for (const button of buttons) {
      button.addEventListener("click", () => {
        const middle = (views[0].scrollLeft + views[0].clientWidth / 2) / views[0].scrollWidth;
        for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
        for (const view of views) {
          view.firstElementChild.style.width = 100 * Number(button.dataset.zoom) + "%";
          view.scrollLeft = middle * view.scrollWidth - view.clientWidth / 2;
        }
      });
    }
    for (const view of views) {
      view.addEventListener("scroll", () => {
        for (const other of views) if (Math.abs(other.scrollLeft - view.scrollLeft) > 0.5) other.scrollLeft = view.scrollLeft;
      });
    }
  }

  for (const area of document.querySelectorAll("[data-chart]")) {
    const series = JSON.parse(area.dataset.chart);
    const cursor = area.querySelector(".cursor");
    const xs = [...new Set(series.flatMap((s) => s.at.map((p) => p[0])))].sort((a, b) => a - b);
    area.addEventListener("pointermove", (event) => {
      const box = area.getBoundingClientRect();
      const wanted = 1000 * (event.clientX - box.left) / box.width;
      const x = xs.reduce((best, at) => (Math.abs(at - wanted) < Math.abs(best - wanted) ? at : best));
      const lines = [];
      let title = "";
      for (const s of series) {
        const point = s.at.find((p) => p[0] === x);
        if (!point) continue;
        title = area.dataset.x + " " + point[1];
        lines.push(s.name + ": " + point[2]);
      }
      cursor.hidden = false;
      cursor.style.left = x / 10 + "%";
      place(event, [title, ...lines].join("\n"));
    });
    area.addEventListener("pointerleave", () => { cursor.hidden = true; hide(); });
  }
})();
