// Elements are made of parts and never of HTML as text, so whatever a name says, it stays text.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function make(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function drawn(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

// What is the same already is left alone, so that nobody's selection, focus or reading is disturbed.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function show(element, isShown) {
  if (element.hidden === isShown) element.hidden = !isShown;
}

export function options(select, values) {
  const now = [...select.options].map((option) => option.value);
  if (now.join("\n") === values.join("\n")) return false;
  const chosen = select.value;
  select.replaceChildren(...values.map((value) => make("option", { value }, value)));
  if (values.includes(chosen)) select.value = chosen;
  return true;
}
