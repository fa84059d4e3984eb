// Theme: light, dark, or as the system says. Not a module: it runs before anything is drawn.

(() => {
  const KEY = "specdec.theme";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = localStorage.getItem(KEY);
  if (stored === "light" || stored === "dark") root.dataset.theme = stored;

  document.addEventListener("click", (event) => {
    if (!event.target.closest("[data-toggles=theme]")) return;
    const now = root.dataset.theme ?? (system.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    localStorage.setItem(KEY, root.dataset.theme);
  });
})();
