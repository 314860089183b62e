// Ticks all boxes of the list by the one in its head.
const all = document.querySelector(".idem-all");
if (all) {
  all.hidden = false;
  all.addEventListener("change", () => document.getElementsByName("record").forEach((box) => { box.checked = all.checked; }));
}
