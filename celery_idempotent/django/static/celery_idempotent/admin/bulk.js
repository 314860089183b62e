/* Lets the box in the head of the list tick all others, and counts them. The server does the same without it. */
"use strict";
(function () {
  let count = () => {};
  function begin() {
    const form = document.getElementById("idem-bulk");
    if (!form) {
      count = () => {};
      return;
    }
    const all = document.querySelector('input[name="all"]');
    const boxes = Array.from(document.querySelectorAll('input[name="record"]'));
    const counter = form.querySelector(".action-counter");
    count = () => {
      const ticked = boxes.filter((box) => box.checked).length;
      all.checked = ticked === boxes.length;
      all.indeterminate = ticked > 0 && ticked < boxes.length;
      counter.textContent = `${ticked} of ${counter.dataset.of} selected`;
    };
    let last = null;
    for (const box of boxes) {
      box.addEventListener("click", (event) => {
        if (event.shiftKey && last && last !== box) {
          const [from, to] = [boxes.indexOf(last), boxes.indexOf(box)].sort((a, b) => a - b);
          boxes.slice(from, to + 1).forEach((each) => { each.checked = box.checked; });
        }
        last = box;
        count();
      });
    }
    all.addEventListener("change", () => {
      boxes.forEach((box) => { box.checked = all.checked; });
      count();
    });
    /* What the browser kept of an earlier look. */
    if (all.checked) {
      boxes.forEach((box) => { box.checked = true; });
    }
    count();
  }
  begin();
  document.addEventListener("idem-refreshed", begin);
  window.addEventListener("pageshow", () => count());
})();
