"use strict";
for (const box of document.querySelectorAll(".timeline")) {
  const svg = box.querySelector("svg"), height = svg.viewBox.baseVal.height;
  const ends = box.querySelectorAll(".ends span"), pointed = box.querySelector(".pointed");
  const step = Number(box.dataset.step);
  let left = 0, width = 1000, dragged = null;
  const said = (s) => s >= 1 ? `${s.toPrecision(4)} s` : s >= 1e-3 ? `${(s * 1e3).toPrecision(4)} ms` : `${(s * 1e6).toPrecision(4)} µs`;
  const show = () => {
    width = Math.min(1000, Math.max(1000 / 4096, width));
    left = Math.min(1000 - width, Math.max(0, left));
    svg.setAttribute("viewBox", `${left} 0 ${width} ${height}`);
    ends[0].textContent = left ? said(left / 1000 * step) : "0 s";
    ends[1].textContent = said((left + width) / 1000 * step);
  };
  const zoom = (factor, at) => { left += at * width * (1 - 1 / factor); width /= factor; show(); };
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(2 ** (-event.deltaY / 240), event.offsetX / svg.clientWidth);
  }, { passive: false });
  svg.addEventListener("pointerdown", (event) => { dragged = event.clientX; svg.setPointerCapture(event.pointerId); });
  svg.addEventListener("pointerup", () => { dragged = null; });
  svg.addEventListener("pointermove", (event) => {
    if (dragged !== null) {
      left -= (event.clientX - dragged) / svg.clientWidth * width;
      dragged = event.clientX;
      show();
    }
    const title = document.elementFromPoint(event.clientX, event.clientY)?.querySelector("title");
    if (title) pointed.textContent = title.textContent;
  });
  for (const button of box.querySelectorAll("button")) {
    button.addEventListener("click", () => {
      const factor = Number(button.dataset.zoom);
      if (factor) zoom(factor, 0.5); else { left = 0; width = 1000; show(); }
    });
  }
}
