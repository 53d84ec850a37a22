package main

import (
	"context"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"autobyte/internal/worker"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// build makes the library and the C client and returns their paths.
func build(t *testing.T) (library, client string) {
	t.Helper()
	for _, tool := range []string{"go", "gcc"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%s is not here", tool)
		}
	}
	dir := t.TempDir()
	library, client = filepath.Join(dir, "libautobyte.so"), filepath.Join(dir, "client")
	run(t, "go", "build", "-buildmode=c-shared", "-buildvcs=false", "-o", library, ".")
	run(t, "gcc", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-g", "-pthread", "-I.",
		"-o", client, "testdata/client.c", library, "-Wl,-rpath,"+dir)
	return library, client
}

func run(t *testing.T, name string, arguments ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, name, arguments...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(arguments, " "), err, out)
	}
	return string(out)
}

var declaration = regexp.MustCompile(`(?m)^int (ab_\w+)\(([^)]*)\);`)

// declared returns the functions of autobyte.h with how many arguments they take.
func declared(t *testing.T) map[string]int {
	t.Helper()
	text, err := os.ReadFile("autobyte.h")
	if err != nil {
		t.Fatal(err)
	}
	functions := map[string]int{}
	for _, m := range declaration.FindAllStringSubmatch(string(text), -1) {
		functions[m[1]] = strings.Count(m[2], ",") + 1
	}
	if len(functions) < 20 {
		t.Fatalf("autobyte.h declares only %v", functions)
	}
	return functions
}

func TestClient(t *testing.T) {
	library, client := build(t)
	for _, check := range []string{"train", "handles", "nulls", "texts", "fork", "leaks"} {
		t.Run(check, func(t *testing.T) {
			if out := run(t, client, check); out != "" {
				t.Errorf("it says: %s", out)
			}
		})
	}
	t.Run("exports", func(t *testing.T) {
		want := declared(t)
		var exported []string
		for _, m := range regexp.MustCompile(`(?m) T (\w+)$`).FindAllStringSubmatch(run(t, "nm", "-D", "--defined-only", library), -1) {
			if strings.HasPrefix(m[1], "ab_") {
				exported = append(exported, m[1])
				if _, ok := want[m[1]]; !ok {
					t.Errorf("%s is exported and not in autobyte.h", m[1])
				}
			}
		}
		for name := range want {
			if !slices.Contains(exported, name) {
				t.Errorf("%s is in autobyte.h and not exported", name)
			}
		}
	})
}

// The Python side declares every function with as many arguments.
func TestPythonKnowsTheHeader(t *testing.T) {
	text, err := os.ReadFile("../../python/autobyte/_lib.py")
	if err != nil {
		t.Fatal(err)
	}
	python := map[string]int{}
	for _, m := range regexp.MustCompile(`(?m)^    "(ab_\w+)": \[(.*)\],$`).FindAllStringSubmatch(string(text), -1) {
		python[m[1]] = strings.Count(m[2], ",") + 1
	}
	for name, arguments := range declared(t) {
		if python[name] != arguments {
			t.Errorf("%s takes %d arguments in autobyte.h, %d in _lib.py", name, arguments, python[name])
		}
	}
	if len(python) != len(declared(t)) {
		t.Errorf("_lib.py declares %d functions, autobyte.h %d", len(python), len(declared(t)))
	}
}

// Nothing may unwind into C: every export runs its work where a panic is
// recovered. The two exceptions only copy a text.
func TestEveryExportRecovers(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "main.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	exports := 0
	for _, decl := range file.Decls {
		f, ok := decl.(*ast.FuncDecl)
		if !ok || f.Doc == nil || !slices.ContainsFunc(f.Doc.List, func(c *ast.Comment) bool { return strings.HasPrefix(c.Text, "//export ") }) {
			continue
		}
		exports++
		protected := f.Name.Name == "go_version" || f.Name.Name == "go_errmsg"
		ast.Inspect(f.Body, func(n ast.Node) bool {
			if c, ok := n.(*ast.CallExpr); ok {
				if id, ok := c.Fun.(*ast.Ident); ok && slices.Contains([]string{"call", "textOf", "recover"}, id.Name) {
					protected = true
				}
			}
			return true
		})
		if !protected {
			t.Errorf("%s recovers from no panic", f.Name.Name)
		}
	}
	if want := len(declared(t)); exports != want {
		t.Errorf("main.go exports %d functions, autobyte.h declares %d", exports, want)
	}
}

func TestCallTurnsWhatHappensIntoCodes(t *testing.T) {
	w, err := worker.Open(worker.Options{World: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = w.Shutdown("") }()
	h := handles.add(w)
	defer handles.remove(h)
	f := func(want int, message string, do func(*worker.Worker) error) {
		t.Helper()
		if code := call(h, do); code != want {
			t.Errorf("code %d, want %d", code, want)
		}
		if got := handles.message(h); !strings.Contains(got, message) {
			t.Errorf("message %q, want %q", got, message)
		}
	}
	f(codeOK, "", func(*worker.Worker) error { return nil })
	f(codeAgain, "", func(*worker.Worker) error { return worker.ErrAgain })
	f(codeStopped, "", func(*worker.Worker) error { return worker.ErrStopped })
	f(codeError, "a reason", func(*worker.Worker) error { return errors.New("a reason") })
	f(codeError, "internal error: out of range", func(*worker.Worker) error { panic("out of range") })
	f(codeError, "internal error: runtime error", func(*worker.Worker) error { var none []int; _ = none[h]; return nil })
}
