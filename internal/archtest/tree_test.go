package archtest_test

import (
	"os"
	"testing"

	"autobyte/internal/archtest"
)

// TestTree applies every rule to this tree.
func TestTree(t *testing.T) {
	tree, err := archtest.Load(os.DirFS("../.."))
	if err != nil {
		t.Fatal(err)
	}
	if len(tree.Packages) < 5 || len(tree.Sources) < 20 {
		t.Fatalf("found only %d packages and %d sources: is this the root of the tree?", len(tree.Packages), len(tree.Sources))
	}
	f := func(rule string, found []archtest.Violation) {
		t.Helper()
		for _, v := range found {
			t.Errorf("%s: %s", rule, v)
		}
	}
	f("table", archtest.CheckTable(archtest.Table))
	f("imports", archtest.CheckImports(tree, archtest.Table))
	f("comments", archtest.CheckComments(tree))
	f("length", archtest.CheckLength(tree))
	f("process", archtest.CheckProcess(tree))
}
