// Clipboard: copies text, also where the page is not served over https.

export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "visually-hidden";
  document.body.append(area);
  area.select();
  document.execCommand("copy"); // the only way on plain http
  area.remove();
}
