/* Counts leases down. Every page says the same without it. */
"use strict";
(function () {
  function words(ms) {
    const past = ms < 0;
    let seconds = Math.floor(Math.abs(ms) / 1000);
    const parts = [];
    for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]]) {
      const count = Math.floor(seconds / size);
      seconds -= count * size;
      if (count || (unit === "s" && !parts.length)) {
        parts.push(`${count} ${unit}`);
      }
    }
    const text = parts.slice(0, 2).join(" ");
    return past ? `ran out ${text} ago` : `${text} left`;
  }

  const timers = Array.from(document.querySelectorAll("[data-left-ms]"), (element) => ({
    element, left: Number(element.dataset.leftMs),
  }));
  const started = performance.now();
  function tick() {
    const passed = performance.now() - started;
    for (const { element, left } of timers) {
      const text = words(left - passed);
      if (element.textContent !== text) {
        element.textContent = text;
      }
    }
  }
  if (timers.length) {
    tick();
    setInterval(tick, 250);
  }
})();
