"use strict";
// What all parts of the page use: the data, elements, numbers in words, tips, the download.

const DATA = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

/** Without control characters and those that turn the direction of a line. */
const clean = (text) => String(text).replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, " ");

/** An element with text, attributes and children. Text is never read as HTML. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.map((child) => (child instanceof Node ? child : clean(child))));
  return made;
}

function duration(us) {
  if (Math.abs(us) < 1000) return `${us.toFixed(1)} us`;
  return Math.abs(us) < 1e6 ? `${(us / 1e3).toFixed(2)} ms` : `${(us / 1e6).toFixed(2)} s`;
}

const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

// ---- tips: of what is pointed at, and of what has the focus

const tip = byId("tip");
let tipped = null;

function showTip(text, box) {
  tip.textContent = text.split("\n").map(clean).join("\n");
  tip.hidden = false;
  const left = Math.min(Math.max(box.left + box.width / 2 - tip.offsetWidth / 2, 8), innerWidth - tip.offsetWidth - 8);
  const above = box.top - tip.offsetHeight - 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 4 ? above : box.bottom + 8}px`;
}

function hideTip() {
  tip.hidden = true;
  tipped = null;
}

function tipOf(event) {
  const target = event.target.closest?.("[data-tip]");
  if (target) {
    showTip(target.dataset.tip, target.getBoundingClientRect());
    tipped = target;
  } else if (event.type === "pointerover" && tipped !== document.activeElement) hideTip();
}

/** What has the focus may have been scrolled to, and its tip goes along. */
function followTip() {
  if (tipped) showTip(tipped.dataset.tip, tipped.getBoundingClientRect());
  else hideTip();
}

document.addEventListener("pointerover", tipOf);
document.addEventListener("focusin", tipOf);
document.addEventListener("focusout", hideTip);
document.addEventListener("scroll", followTip, { capture: true, passive: true });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

// ---- the data, as a file

function download() {
  const address = URL.createObjectURL(new Blob([byId("data").textContent], { type: "application/json" }));
  const name = DATA.title.replace(/[^\w.-]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 60);
  element("a", { href: address, download: `${name || "report"}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

byId("download").hidden = false;
byId("download").addEventListener("click", download);
document.documentElement.classList.add("scripted");
