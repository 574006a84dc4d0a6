{{- define "pdserve.modelClaim" -}}
{{ .Values.model.volume.existingClaim | default (printf "%s-models" (include "pdserve.fullname" .)) }}
{{- end -}}

{{- define "pdserve.modelScript" -}}
- name: script
  configMap:
    name: {{ include "pdserve.modelVolume" . }}
    items: [{ key: model_volume.py, path: model_volume.py }]
{{- end -}}
