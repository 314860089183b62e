/* Ticks all boxes of the list by the one in its head. */
"use strict";
(function () {
  const all = document.querySelector(".idem-all");
  if (!all) {
    return;
  }
  const boxes = Array.from(document.querySelectorAll('input[name="record"]'));
  all.hidden = false;
  all.addEventListener("change", () => boxes.forEach((box) => { box.checked = all.checked; }));
})();
