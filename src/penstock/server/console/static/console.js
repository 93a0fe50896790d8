// The few things that pages do by themselves: light or dark, and live numbers.
"use strict";
(() => {
  const root = document.documentElement;
  const chosen = localStorage.getItem("penstock-scheme");
  if (chosen) root.dataset.scheme = chosen;

  const show = (key, text) => {
    for (const each of document.querySelectorAll(`[data-live="${CSS.escape(key)}"]`)) {
      if (each instanceof SVGElement) { each.setAttribute("points", text); continue; }
      if (each.textContent === text) continue;
      each.textContent = text;
      each.classList.toggle("zero", text === "0" || text === "–");
      each.classList.remove("changed");
      void each.offsetWidth;  // begins the animation anew
      each.classList.add("changed");
    }
  };

  let stream = null;
  const listen = () => {
    const source = document.querySelector("[data-stream]");
    const status = document.getElementById("live");
    const wanted = source && !document.hidden ? source.dataset.stream : "";
    if (stream && stream.wanted === wanted) return;
    if (stream) stream.close();
    stream = null;
    status.textContent = "";
    if (!wanted) return;
    stream = new EventSource(wanted);
    stream.wanted = wanted;
    stream.onopen = () => { status.textContent = "Live"; };
    stream.onerror = () => {
      status.textContent = stream.readyState === EventSource.CLOSED ? "Not live: load the page again" : "Connecting again …";
    };
    stream.onmessage = (event) => {
      const texts = JSON.parse(event.data);
      // The figures of all queues have come: the order of the rows may be another.
      if ("reload" in texts) location.reload();
      for (const [key, text] of Object.entries(texts)) show(key, text);
    };
  };

  document.addEventListener("DOMContentLoaded", () => {
    document.getElementById("scheme").addEventListener("click", () => {
      const dark = root.dataset.scheme ? root.dataset.scheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.scheme = dark ? "light" : "dark";
      localStorage.setItem("penstock-scheme", root.dataset.scheme);
    });
    listen();
  });
  document.addEventListener("htmx:afterSettle", listen);
  // A page that nobody sees asks for nothing.
  document.addEventListener("visibilitychange", listen);
})();
